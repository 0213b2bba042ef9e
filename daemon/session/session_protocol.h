// SPDX-License-Identifier: Apache-2.0
// SessionProtocol: the messages of one session socket, without the socket: requests in, replies out.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/refused_connections.h"
#include "daemon/runtime/unique_fd.h"
#include "daemon/runtime/unix_socket.h"
#include "daemon/session/budget.h"
#include "daemon/session/hosted_memory.h"
#include "daemon/session/session.h"
#include "daemon/session/session_table.h"
#include "storage/tier/memory_tier.h"

namespace ashlar::v1 {
class Hello;
class SessionRequest;
}  // namespace ashlar::v1

namespace ashlar::daemon {

struct TenantUser {
  storage::TenantId id = 0;
  std::string name;
  RegionBudgets regions;           // budget of all sessions of the tenant
  std::shared_ptr<Budget> models;  // budget of all sessions of the tenant
  uint32_t max_sessions = 0;
  std::shared_ptr<std::atomic<uint64_t>> unsent;  // replies whose descriptor could not be sent
};

// The peer process, as the kernel reports it.
struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
};

// The services shared by all sessions. They must outlive the sessions.
struct SessionServices {
  EventLoop& loop;      // the metadata thread
  EventLoop& mappings;  // allocates and unmaps large memory
  HostedMemory& hosted;
  SessionTable& table;
  // for the metadata thread; indexed by their arenas (storage::kArenasApart)
  std::vector<const storage::MemoryTier*> tiers;
  std::map<uid_t, TenantUser> tenant_of_uid;
  uint64_t region_bytes = 0;  // per session, like the limits below
  uint32_t max_regions = 0;
  // A GPU for regions, and the level (Cache::SetLevel) of its engines; no level if the GPU has no tier.
  struct Seat {
    const kernels::Gpu* gpu = nullptr;
    std::optional<size_t> level;
  };
  std::vector<Seat> gpus;
  RefusedConnections& refused;
  // Bytes of the machine's memory reserved for future arenas. Engine memory is not allocated from them.
  std::atomic<uint64_t> memory_to_come{0};
  std::shared_ptr<RegionGuard> guard = RegionGuard::Make();  // null if the kernel does not allow it
};

// The conversation with one peer. One thread calls it, one request at a time: the next one only after the reply.
class SessionProtocol {
 public:
  struct Reply {
    std::string bytes;    // an encoded SessionReply
    UniqueFd descriptor;  // sent with the reply if valid
    bool close = false;   // the session ends after this reply
    // Returns the reply to send if the descriptor cannot be sent now, and undoes the grant. Set if there is a
    // descriptor.
    std::function<Reply(const absl::Status& why)> otherwise;
  };
  // Called exactly once for each request, on any thread.
  using Respond = std::function<void(Reply)>;

  // `tenant` is the peer's, and one of the services' tenants.
  SessionProtocol(SessionServices& services, Peer peer, const TenantUser& tenant)
      : services_(services), peer_(peer), tenant_(tenant) {}

  // The last reply to a peer that is refused or violates the protocol.
  static Reply Goodbye(const absl::Status& status);

  void Handle(absl::StatusOr<Datagram> datagram, Respond respond);

  const TenantUser& tenant() const { return tenant_; }
  // Null before the peer's Hello.
  const std::shared_ptr<Session>& session() const { return session_; }

 private:
  void SayHello(const v1::Hello& hello, Respond respond);
  void RegisterRegion(uint64_t bytes, const std::vector<UniqueFd>& descriptors, Respond respond);
  void RegisterUntouched(std::shared_ptr<Region> region, const UniqueFd& memfd, Budget::Charge number, uint64_t bytes,
                         Respond respond);
  absl::Status CheckCapacityAfterAbandon() const;
  // Returns the GPU of a RegisterRegion's fields on_gpu and gpu, if regions of this session may be on it.
  absl::StatusOr<SessionServices::Seat> SeatOf(const std::string& gpu) const;
  // Checks whether regions of this session may be in host memory. Errors name `field`.
  absl::Status MayBeNear(absl::string_view field) const;
  void RegisterOnGpu(uint64_t bytes, const std::string& gpu, std::vector<UniqueFd> descriptors, Respond respond);
  void HostRegion(uint64_t bytes, Respond respond);
  void GetArena(uint32_t arena, Respond respond);
  void DropRegion(uint64_t region, Respond respond);

  SessionServices& services_;
  const Peer peer_;
  const TenantUser& tenant_;
  std::shared_ptr<Session> session_;
};

}  // namespace ashlar::daemon
