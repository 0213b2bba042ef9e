// SPDX-License-Identifier: Apache-2.0
// PeerTable: the nodes that this side has requests for. Their requests start in turns, within limits of bytes in
// flight.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/ucx.h"

namespace ashlar::daemon {

struct PeerState {
  HostPort address;
  Link* link = nullptr;
  bool heard = false;  // a message has come over the current link
  bool slow = false;   // RDMA is expected, but was not used for the last link
  std::string lanes, path;
  std::map<uint64_t, uint64_t> waiting;  // requests in order of their numbers, with their bytes
  std::set<uint64_t> running;
  uint64_t bytes_in_flight = 0;
  uint64_t failures = 0;                        // since the start
  int failures_in_a_row = 0;                    // since the last message
  int64_t not_before = 0;                       // earliest time of the next connection attempt
  uint64_t bytes_sent = 0, bytes_received = 0;  // over closed links
};

class PeerTable {
 public:
  PeerTable(const TransportOptions& options, uint64_t seed)
      : options_(options), jitter_(static_cast<std::minstd_rand::result_type>(seed)) {}
  PeerTable(const PeerTable&) = delete;
  PeerTable& operator=(const PeerTable&) = delete;

  PeerState& Of(const HostPort& address);  // the reference stays valid until Remove
  // Removes all peers without requests, except these. Calls `remove` for each before.
  void Keep(const std::vector<HostPort>& kept, absl::FunctionRef<void(PeerState&)> remove);

  void Wait(PeerState& peer, uint64_t request, uint64_t bytes);
  // Returns the request that starts next; none if none fits.
  std::optional<uint64_t> Next();
  void Start(PeerState& peer, uint64_t request);
  void End(PeerState& peer, uint64_t request, uint64_t bytes);  // a waiting or running one
  // Returns whether waiting requests may be able to start: something has changed since TakeMayStart.
  bool may_start() const { return may_start_; }
  bool TakeMayStart() { return std::exchange(may_start_, false); }

  // The peer's current link broke. The next connection waits for a time that grows with each failure.
  void Lost(PeerState& peer, int64_t now);

  bool AnySlow() const;
  void AddTo(TransportStats& stats) const;

 private:
  const TransportOptions& options_;
  std::minstd_rand jitter_;
  std::map<std::string, std::unique_ptr<PeerState>> peers_;  // keyed by name
  std::string last_turn_;                                    // name of the peer with the last turn
  uint64_t bytes_in_flight_ = 0;
  bool may_start_ = false;
};

}  // namespace ashlar::daemon
