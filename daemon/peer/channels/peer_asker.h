// SPDX-License-Identifier: Apache-2.0
// PeerAsker: the calls that this node makes to other nodes about objects to fetch.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/peer/control/peer_calls.h"
#include "daemon/peer/control/peer_messages.h"
#include "daemon/peer/directory/directory.h"

namespace ashlar::daemon {

// Thread-safe; never blocks. Every call is answered once, on any thread, within seconds. If the node is not connected,
// the answer is UNAVAILABLE immediately.
class PeerAsker {
 public:
  virtual ~PeerAsker() = default;

  // Returns whether the configuration of this node shares the tenant with that node. The other node's configuration may
  // differ.
  virtual bool Shares(const Member& member, const std::string& tenant) const = 0;
  virtual void Open(const Member& member, const std::string& tenant, PeerOpen open,
                    PeerCalls::Done<std::vector<PeerOpened>> done) = 0;
  virtual void Renew(const Member& member, PeerRenew renew, PeerCalls::Done<std::vector<uint32_t>> done) = 0;
  // Answered within the offer's patience, which may be longer than for other calls.
  virtual void Offer(const Member& member, const std::string& tenant, PeerOffer offer,
                     PeerCalls::Done<std::vector<TakeOutcome>> done) = 0;
  virtual void Close(const Member& member, std::vector<PeerLease> leases, std::function<void(absl::Status)> done) = 0;
};

}  // namespace ashlar::daemon
