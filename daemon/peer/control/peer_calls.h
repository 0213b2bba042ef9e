// SPDX-License-Identifier: Apache-2.0
// PeerCalls: handles the calls of peers, and learns about their connections.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/peer/control/peer_messages.h"
#include "storage/ids.h"

namespace ashlar::daemon {

// Called on gRPC's threads, concurrently. No method may block or call the server. Every `done` must be called once, on
// any thread, even for a disconnected peer, because the server waits for it when it stops. A status other than OK is
// the result of the call. `peer` is the caller, as authenticated. What it holds belongs to its node and incarnation.
class PeerCalls {
 public:
  template <typename Reply>
  using Done = std::function<void(absl::StatusOr<Reply>)>;

  virtual ~PeerCalls() = default;

  // A peer has completed the handshake. Called again, without PeerGone, if it reconnects.
  virtual void PeerHere(const PeerHello& peer) = 0;
  // The connection of a peer has ended, or the node connected as another incarnation. What it held is released.
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
  virtual void Probe(const PeerHello& peer, storage::TenantId tenant, PeerProbe probe, Done<v1::NodeProbe> done) = 0;
};

}  // namespace ashlar::daemon
