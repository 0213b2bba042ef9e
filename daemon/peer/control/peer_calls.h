// SPDX-License-Identifier: Apache-2.0
// PeerCalls: what this node answers its peers, and learns of them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/peer/control/peer_messages.h"
#include "storage/ids.h"

namespace ashlar::daemon {

// Called on gRPC's threads, by several at once; no call may block, nor call the server. Every `done` is to be called
// once, on any thread, also for a peer that has gone: the server's end waits for it. A status other than OK is the
// call's. `peer` is who asks, as its certificate and greeting say; what it holds belongs to its node and incarnation.
class PeerCalls {
 public:
  template <typename Reply>
  using Done = std::function<void(absl::StatusOr<Reply>)>;

  virtual ~PeerCalls() = default;

  // A peer has greeted; calls of it follow. Again, without PeerGone between, when it has connected anew.
  virtual void PeerHere(const PeerHello& peer) = 0;
  // Its connection has ended, or it greets as another incarnation: what it held ends.
  virtual void PeerGone(const std::string& node) = 0;

  virtual void Open(const PeerHello& peer, storage::TenantId tenant, PeerOpen open,
                    Done<std::vector<PeerOpened>> done) = 0;
  virtual void Renew(const PeerHello& peer, PeerRenew renew, Done<std::vector<uint32_t>> done) = 0;
  virtual void Close(const PeerHello& peer, std::vector<PeerLease> leases) = 0;
  virtual void Offer(const PeerHello& peer, storage::TenantId tenant, PeerOffer offer,
                     Done<std::vector<TakeOutcome>> done) = 0;
  virtual void Workers(const PeerHello& peer, storage::TenantId tenant, const NamespaceId& ns,
                       Done<std::vector<PeerWorker>> done) = 0;
  virtual void Prefill(const PeerHello& peer, storage::TenantId tenant, PeerPrefill prefill, Done<PeerOpened> done) = 0;
};

}  // namespace ashlar::daemon
