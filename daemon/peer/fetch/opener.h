// SPDX-License-Identifier: Apache-2.0
// Opener: asks other nodes for objects, several in one call, and reads their answers.
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

// An object on another node, leased there for this one.
struct OpenedObject {
  std::shared_ptr<const Member> member;
  ObjectHeader header;
  std::string encoded;  // the header, byte for byte
  PeerLease lease{};
  Grant grant;
  std::shared_ptr<const RemoteMemory> memory;  // null: its bytes come by messages alone
  storage::Nanos leased_until = 0;
};

// Reads what a peer has answered for an object, which was asked for at that time: a miss and a header that is none are
// errors.
absl::StatusOr<OpenedObject> TakeOpened(PeerOpened& answer, const std::shared_ptr<const Member>& member,
                                        storage::Nanos asked_at);

// The metadata thread makes all calls and gets all answers.
class Opener {
 public:
  // All must outlive it. `names`: the tenants' names, by number.
  Opener(EventLoop& loop, const storage::Clock& clock, const Directory& directory, PeerAsker& asker, PeerRates& rates,
         std::vector<std::string> names)
      : loop_(loop), clock_(clock), directory_(directory), asker_(asker), rates_(rates), names_(std::move(names)) {}

  // One result a wanted object, in order: a miss, a refusal, a header that is none, and an object that the cluster is
  // erasure are errors. The objects are the caller's, to be closed.
  using Opened = std::vector<absl::StatusOr<OpenedObject>>;
  void Open(storage::TenantId tenant, std::shared_ptr<const Member> member, std::vector<PeerObject> wanted,
            std::function<void(Opened)> done);

  // Gives objects back at a node, soon and several in one call.
  void Close(const std::shared_ptr<const Member>& member, const PeerLease& lease);
  // Returns whether this node's configuration shares the tenant with that node.
  bool Shares(const Member& member, storage::TenantId tenant) const { return asker_.Shares(member, names_.at(tenant)); }
  void Flush();  // what waits to be closed; call it now and then

  static constexpr uint32_t kLeaseMillis = 60'000;  // what is opened is renewed at half of it

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

  std::map<uint64_t, Closing> closing_;  // by the member's incarnation
};

}  // namespace ashlar::daemon
