// SPDX-License-Identifier: Apache-2.0
// SessionTable: all sessions, from their opening to the moment when nothing touches their memory any more.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/session/session.h"
#include "storage/cache.h"

namespace ashlar::daemon {

inline constexpr size_t kSecretBytes = 16;
std::string RandomSecret();

// Thread-safe.
class SessionTable {
 public:
  // Both must outlive the table and everything that was posted for it.
  SessionTable(storage::Cache& cache, EventLoop& loop) : cache_(cache), loop_(loop) {}

  // 16 random bytes that name this run of the daemon: a restarted one has others.
  const std::string& daemon_epoch() const { return daemon_epoch_; }

  // Makes the session known to the cache and to Find, then calls `opened` on the metadata thread. RESOURCE_EXHAUSTED
  // when the loop's queue is full.
  absl::Status Open(std::shared_ptr<Session> session, std::function<void()> opened);

  // Ends an opened session: Find no longer knows it, the cache frees its leases and reservations, and its memory is
  // released when transfers in flight have drained. Nobody waits for the unmapping. Logs what was freed. Calling it
  // again does nothing.
  void Close(const std::shared_ptr<Session>& session, std::string reason);

  // Where the session's engine lands from, and maps (Cache::SetLevel). The metadata thread only.
  void SetLevel(const Session& session, size_t level) { cache_.SetLevel(session.about().id, level); }

  // Null for an unknown secret and for a session that has ended.
  std::shared_ptr<Session> Find(absl::string_view secret) const;

  struct Owner {
    storage::SessionId session = 0;
    storage::TenantId tenant = 0;
    uid_t uid = 0;  // of the process that opened it
  };
  // Returns whose session it is, if it is open, or has ended and still drains; none for any other.
  std::optional<Owner> OwnerOf(absl::string_view secret) const;

  // Calls `drained` once nothing touches the memory of this session, which has ended; at once when the table does not
  // know it any more. The metadata thread only.
  void WhenDrained(absl::string_view secret, std::function<void()> drained);

  size_t size() const;  // those that drain included

  struct Listed {
    std::shared_ptr<const Session> session;
    bool draining = false;  // ended; transfers in flight still use its memory
  };
  std::vector<Listed> List() const;  // by number

 private:
  struct Entry {
    std::shared_ptr<Session> session;
    bool ended = false;
  };
  // False: what it held is not all free yet.
  bool CloseOnLoop(const std::shared_ptr<Session>& session, const Session::Memory& memory, const std::string& reason,
                   storage::Slice& slice);
  void Drained(const std::shared_ptr<Session>& session);

  storage::Cache& cache_;
  EventLoop& loop_;
  const std::string daemon_epoch_ = RandomSecret();

  mutable std::mutex mutex_;
  absl::flat_hash_map<std::string, Entry> sessions_;  // by secret; guarded by mutex_
};

}  // namespace ashlar::daemon
