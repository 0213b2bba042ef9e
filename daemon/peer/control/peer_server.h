// SPDX-License-Identifier: Apache-2.0
// PeerServer: serves PeerCalls by gRPC on a TCP address, for other daemons.
//
// With TLS, only members with a valid certificate pass the TLS handshake. The greeting must then name the node of the
// certificate. A node has one connection; a new one replaces it. Certificates of open connections are checked again
// periodically, so that a removed authority or an expired certificate closes them.
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
  static constexpr int kCallsOfAPeer = 64;  // per peer in flight; further calls wait at the peer

  struct Options {
    HostPort listen;
    PeerHello self;
    storage::Nanos timeout = 10'000'000'000;     // a connection that is silent for this long is closed
    storage::Nanos check_every = 5'000'000'000;  // interval of checks of connections' certificates
  };
  // With a null `tls`, any host that reaches the port is accepted as the member it claims to be; the log warns. All
  // arguments must outlive the server. UNAVAILABLE if the address cannot be listened on.
  static absl::StatusOr<std::unique_ptr<PeerServer>> Start(Options options, const Tls* tls, const PeerPolicy& policy,
                                                           PeerCalls& calls, Refusals& refusals);
  // Refuses new calls, closes all connections (with a PeerGone each), and waits for pending replies.
  ~PeerServer();

  uint16_t port() const;
  size_t peers() const;  // connected peers that completed the handshake; any thread

 private:
  struct Impl;
  explicit PeerServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
