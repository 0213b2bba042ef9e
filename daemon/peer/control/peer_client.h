// SPDX-License-Identifier: Apache-2.0
// PeerClient: makes calls to one other daemon. It connects, performs the handshake, and reconnects when the connection
// ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/peer/control/peer_messages.h"
#include "daemon/security/refusals.h"
#include "daemon/security/tls.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// Thread-safe. No call blocks. Callbacks run on gRPC's threads, or on the calling thread if the result is known
// immediately, and without locks.
class PeerClient {
 public:
  static constexpr size_t kCalls = 64;  // calls in flight; more are RESOURCE_EXHAUSTED immediately

  struct Options {
    std::string node;     // expected node name of the peer
    std::string address;  // host:port
    PeerHello self;
    storage::Nanos timeout = 10'000'000'000;  // a peer that is silent for this long is disconnected
    // Deadline of a call. If replies of this peer were measured to take longer, the deadline is longer, at most
    // `longest_call`. Each unanswered call doubles it for the next ones.
    storage::Nanos call_timeout = 5'000'000'000;
    storage::Nanos longest_call = 5'000'000'000;
    storage::Nanos first_retry = 100'000'000;  // doubles with jitter up to
    storage::Nanos longest_retry = 1'000'000'000;
    // Called after a successful handshake, and when that connection ends; in this order, and never for a refused
    // connection.
    std::function<void(const PeerHello&)> here;
    std::function<void()> gone;
  };
  template <typename Reply>
  using Done = std::function<void(absl::StatusOr<Reply>)>;

  // `tls` may be null for plain TCP. `tls` and `refusals` must outlive the client. Starts connecting.
  PeerClient(Options options, const Tls* tls, Refusals& refusals);
  // Cancels calls in flight and waits for their callbacks. Must not be called from a callback.
  ~PeerClient();
  PeerClient(const PeerClient&) = delete;
  PeerClient& operator=(const PeerClient&) = delete;

  bool connected() const;

  // UNAVAILABLE immediately if the peer is not connected. INVALID_ARGUMENT or INTERNAL with a field's name: the peer
  // refused the request, or its reply is invalid. The policy must share `tenant` with the node.
  void Open(const std::string& tenant, PeerOpen open, Done<std::vector<PeerOpened>> done);
  void Renew(PeerRenew renew, Done<std::vector<uint32_t>> done);
  // DEADLINE_EXCEEDED after the offer's patience plus the deadline of a call.
  void Offer(const std::string& tenant, PeerOffer offer, Done<std::vector<TakeOutcome>> done);
  void Close(const std::vector<PeerLease>& leases, std::function<void(absl::Status)> done);
  void Workers(const std::string& tenant, const NamespaceId& ns, Done<std::vector<PeerWorker>> done);
  // DEADLINE_EXCEEDED after its patience; that does not count as a failed connection.
  void Prefill(const std::string& tenant, PeerPrefill prefill, Done<PeerOpened> done);
  void Probe(const std::string& tenant, const PeerProbe& probe, Done<v1::NodeProbe> done);

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
