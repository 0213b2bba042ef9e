// SPDX-License-Identifier: Apache-2.0
// PeerClient: the calls to one other daemon. It connects by itself, greets, and connects again when that ends.
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

// Thread-safe. No call blocks. Callbacks run on gRPC's threads, or on the caller's where the answer is known at once,
// and with no lock held.
class PeerClient {
 public:
  static constexpr size_t kCalls = 64;  // under way; more are RESOURCE_EXHAUSTED at once

  struct Options {
    std::string node;     // who the other end must be
    std::string address;  // host:port
    PeerHello self;
    storage::Nanos timeout = 10'000'000'000;  // a peer that is silent for so long is gone
    // DEADLINE_EXCEEDED behind it, or behind what answers of this peer were measured to take, where that is longer, but
    // no longer than `longest_call`. Each call that is not answered doubles it for the next ones.
    storage::Nanos call_timeout = 5'000'000'000;
    storage::Nanos longest_call = 5'000'000'000;
    storage::Nanos first_retry = 100'000'000;  // doubles, with jitter, up to
    storage::Nanos longest_retry = 1'000'000'000;
    // Told when the peer has answered a greeting, and when that connection has ended; in turn, never for a connection
    // that was refused.
    std::function<void(const PeerHello&)> here;
    std::function<void()> gone;
  };
  template <typename Reply>
  using Done = std::function<void(absl::StatusOr<Reply>)>;

  // Null `tls`: without. `tls` and `refusals` must outlive the client. It begins to connect.
  PeerClient(Options options, const Tls* tls, Refusals& refusals);
  // Cancels what is under way, and waits for its callbacks. Not from one of them.
  ~PeerClient();
  PeerClient(const PeerClient&) = delete;
  PeerClient& operator=(const PeerClient&) = delete;

  bool connected() const;

  // UNAVAILABLE at once while the peer is not connected. INVALID_ARGUMENT or INTERNAL that names a field: the peer
  // refused the request, or its reply is wrong. `tenant`: its name, one that the policy shares with the node.
  void Open(const std::string& tenant, PeerOpen open, Done<std::vector<PeerOpened>> done);
  void Renew(PeerRenew renew, Done<std::vector<uint32_t>> done);
  // DEADLINE_EXCEEDED behind the offer's patience and a call's.
  void Offer(const std::string& tenant, PeerOffer offer, Done<std::vector<TakeOutcome>> done);
  void Close(const std::vector<PeerLease>& leases, std::function<void(absl::Status)> done);
  void Workers(const std::string& tenant, const NamespaceId& ns, Done<std::vector<PeerWorker>> done);
  // DEADLINE_EXCEEDED after its patience, which is no failure of the peer's connection.
  void Prefill(const std::string& tenant, PeerPrefill prefill, Done<PeerOpened> done);

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
