// SPDX-License-Identifier: Apache-2.0
// Opener: requests objects from other nodes, several per call, and parses the replies.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/peer/channels/peer_asker.h"
#include "daemon/peer/channels/peer_rates.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/transport/grant.h"
#include "daemon/peer/transport/remote_memory.h"
#include "daemon/runtime/event_loop.h"
#include "proto/key.h"
#include "proto/object.h"
#include "proto/shard.h"
#include "storage/executor.h"
#include "storage/ids.h"

namespace ashlar::daemon {

// An object on another node, leased there for this node.
struct OpenedObject {
  std::shared_ptr<const Member> member;
  ObjectHeader header;
  std::string encoded;  // encoded header, byte for byte
  PeerLease lease{};
  Grant grant;
  std::shared_ptr<const RemoteMemory> memory;  // null if its bytes come by messages only
  storage::Nanos leased_until = 0;
};

// Parses a peer's answer for one object. `asked_at` is when it was requested. A miss and an invalid header are errors.
absl::StatusOr<OpenedObject> TakeOpened(PeerOpened& answer, const std::shared_ptr<const Member>& member,
                                        storage::Nanos asked_at);

// Used by the metadata thread only.
class Opener {
 public:
  // All must outlive the object. `names` are the tenant names by number.
  Opener(EventLoop& loop, const storage::Clock& clock, const Directory& directory, PeerAsker& asker, PeerRates& rates,
         std::vector<std::string> names)
      : loop_(loop), clock_(clock), directory_(directory), asker_(asker), rates_(rates), names_(std::move(names)) {}

  // One result per wanted object, in order. A miss, a refusal, an invalid header and an object that is being erased are
  // errors. The caller must close the objects.
  using Opened = std::vector<absl::StatusOr<OpenedObject>>;
  void Open(storage::TenantId tenant, std::shared_ptr<const Member> member, std::vector<PeerObject> wanted,
            std::function<void(Opened)> done);

  // Releases an object at a node soon, several per call.
  void Close(const std::shared_ptr<const Member>& member, const PeerLease& lease);
  // Returns whether this node's configuration shares the tenant with that node.
  bool Shares(const Member& member, storage::TenantId tenant) const { return asker_.Shares(member, names_.at(tenant)); }
  void Flush();  // sends queued closes; call it periodically

  static constexpr uint32_t kLeaseMillis = 60'000;  // lease time of opened objects; renewed at half of it

 private:
  EventLoop& loop_;
  const storage::Clock& clock_;
  const Directory& directory_;
  PeerAsker& asker_;
  PeerRates& rates_;
  const std::vector<std::string> names_;
  struct Closing {
    std::shared_ptr<const Member> member;
    std::vector<PeerLease> leases;
  };
  void CloseSome(const std::shared_ptr<const Member>& member, std::vector<PeerLease> leases);

  std::map<uint64_t, Closing> closing_;  // key: incarnation of the member
};

}  // namespace ashlar::daemon
