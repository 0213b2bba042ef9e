// SPDX-License-Identifier: Apache-2.0
// SessionTable: all sessions, from opening until nothing accesses their memory any more.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/session/session.h"
#include "kernels/mutex.h"
#include "storage/cache.h"

namespace ashlar::daemon {

inline constexpr size_t kSecretBytes = 16;
std::string RandomSecret();

// Thread-safe.
class SessionTable {
 public:
  // Both must outlive the table and everything posted for it.
  SessionTable(storage::Cache& cache, EventLoop& loop) : cache_(cache), loop_(loop) {}

  // 16 random bytes that identify this run of the daemon; a restarted daemon has others.
  const std::string& daemon_epoch() const { return daemon_epoch_; }

  // Adds the session to the cache and to Find, then calls `opened` on the metadata thread. RESOURCE_EXHAUSTED if the
  // loop's queue is full.
  absl::Status Open(std::shared_ptr<Session> session, std::function<void()> opened);

  // Ends a session: Find no longer returns it, the cache releases its leases and reservations, and its memory is
  // released when transfers in flight have drained. Does not wait for the unmapping. Logs what was released. Repeated
  // calls have no effect.
  void Close(const std::shared_ptr<Session>& session, std::string reason);

  // Sets the tier level that the session's engine lands from and maps (Cache::SetLevel). The metadata thread only.
  void SetLevel(const Session& session, size_t level) { cache_.SetLevel(session.about().id, level); }

  // Null for an unknown secret and for an ended session.
  std::shared_ptr<Session> Find(absl::string_view secret) const;

  struct Owner {
    storage::SessionId session = 0;
    storage::TenantId tenant = 0;
    uid_t uid = 0;  // user of the process that opened it
  };
  // Returns the owner of a session that is open or still draining; nothing for others.
  std::optional<Owner> OwnerOf(absl::string_view secret) const;

  // Calls `drained` when nothing accesses the memory of this ended session; immediately if the table does not have it.
  // The metadata thread only.
  void WhenDrained(absl::string_view secret, std::function<void()> drained);

  size_t size() const;  // including draining sessions

  struct Listed {
    std::shared_ptr<const Session> session;
    bool draining = false;  // ended; transfers in flight still use its memory
  };
  std::vector<Listed> List() const;  // sorted by number

 private:
  struct Entry {
    std::shared_ptr<Session> session;
    bool ended = false;
  };
  // Returns false if not everything it held is free yet.
  bool CloseOnLoop(const std::shared_ptr<Session>& session, const Session::Memory& memory, const std::string& reason,
                   storage::Slice& slice);
  void Drained(const std::shared_ptr<Session>& session);

  storage::Cache& cache_;
  EventLoop& loop_;
  const std::string daemon_epoch_ = RandomSecret();

  mutable Mutex mutex_;
  absl::flat_hash_map<std::string, Entry> sessions_ ABSL_GUARDED_BY(mutex_);  // keyed by secret
};

}  // namespace ashlar::daemon
