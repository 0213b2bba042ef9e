// SPDX-License-Identifier: Apache-2.0
// PeerServer: gRPC in front of PeerCalls, on a TCP address, for other daemons.
//
// With TLS, only members with a good certificate get through the handshake; then a greeting must name the node that the
// certificate names. A node has one connection: a later one takes its place. Certificates of connections are judged
// again now and then, so that an authority that was taken away, or an expired certificate, ends them.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/peer/control/peer_calls.h"
#include "daemon/runtime/host_port.h"
#include "daemon/security/peer_policy.h"
#include "daemon/security/refusals.h"
#include "daemon/security/tls.h"
#include "storage/executor.h"

namespace ashlar::daemon {

class PeerServer {
 public:
  static constexpr int kCallsOfAPeer = 64;  // under way; more wait at the peer

  struct Options {
    HostPort listen;
    PeerHello self;
    storage::Nanos timeout = 10'000'000'000;     // a peer whose connection is silent for so long is gone
    storage::Nanos check_every = 5'000'000'000;  // of connections' certificates
  };
  // Null `tls`: whoever reaches the port is believed to be the member that it says it is; the log says so. All
  // arguments must outlive the server. UNAVAILABLE when the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<PeerServer>> Start(Options options, const Tls* tls, const PeerPolicy& policy,
                                                           PeerCalls& calls, Refusals& refusals);
  // Takes no more calls, ends all connections (each is a PeerGone), and waits for the answers that are under way.
  ~PeerServer();

  uint16_t port() const;
  size_t peers() const;  // that have greeted and are connected; any thread

 private:
  struct Impl;
  explicit PeerServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
