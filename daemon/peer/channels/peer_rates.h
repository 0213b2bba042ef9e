// SPDX-License-Identifier: Apache-2.0
// PeerRates: measures the latency of calls and the throughput of copies for each other node.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "daemon/runtime/round_trips.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// The metadata thread only. Recent measurements have more weight. Copies are weighted by their bytes.
class PeerRates {
 public:
  // A call was answered after `took`.
  void Answered(const std::string& node, storage::Nanos took);
  // A call was not answered. The node is not asked again until it answers a probe (PeerProbes).
  void Failed(const std::string& node);
  void Healed(const std::string& node) { rates_[node].failed = false; }
  bool MayAsk(const std::string& node) const;
  // Returns the nodes that failed to answer and have not answered since.
  std::set<std::string> Failing() const;
  // Drops nodes that are not in `nodes` once no copy from them is in flight.
  void Keep(const std::set<std::string>& nodes);

  // A copy of `bytes` begins, and ends with any result.
  void Begins(const std::string& node, uint64_t bytes, storage::Nanos now);
  void Ends(const std::string& node, uint64_t bytes, storage::Nanos now);
  // `bytes` of the copies in flight have arrived since the last call.
  void Moved(const std::string& node, uint64_t bytes, storage::Nanos now);
  // A copy of `bytes` took `took`, including the time spent on other copies' bytes.
  void Came(const std::string& node, uint64_t bytes, storage::Nanos took);
  // The bytes that came from the node were used.
  void Used(const std::string& node, uint64_t bytes) { rates_[node].used += bytes; }
  // A copy that began at `began` was abandoned. Until a copy succeeds, later copies get more time.
  void Abandoned(const std::string& node, storage::Nanos began, storage::Nanos now);

  struct Figures {
    double bytes_per_second = 0;  // throughput of single copies, as Estimate uses it; 0 before the first copy
    storage::Nanos rtt = 0;       // round-trip time of a call; 0 before the first reply
    uint64_t failed_calls = 0;    // calls without a reply, since the start
    uint64_t stalls = 0;          // abandoned copies, since the start
    uint64_t bytes = 0;           // bytes received and used, since the start
  };
  Figures Of(const std::string& node) const;

  // Estimates the time until an object that is requested now has arrived. 0 if nothing is known of the node.
  storage::Nanos Estimate(const std::string& node, uint64_t bytes) const;
  // Estimates the transfer time from the throughput of all copies together, which does not depend on how many share the
  // link. It excludes the latency of the call, because objects share calls and copies overlap. For copies in flight it
  // assumes that at most one more message than reported has arrived. 0 without enough recent measurements.
  storage::Nanos Transfer(const std::string& node, uint64_t bytes, storage::Nanos now) const;
  // Returns how long to wait for a copy of `bytes` that begins now: `factor` times the expected time after the copies
  // in flight, plus the time to connect.
  storage::Nanos Patience(const std::string& node, uint64_t bytes, double factor,
                          const RoundTrips::Bounds& bounds) const;

 private:
  static constexpr double kKept = 0.9;                              // weight of earlier measurements at each new one
  static constexpr double kLinkBytes = 16 << 20, kLinkNanos = 1e9;  // window of the link measurement
  static constexpr storage::Nanos kFresh = 10'000'000'000;          // afterwards the link is measured again
  static constexpr double kLeastNanos = 50e6;

  struct Rate {
    RoundTrips answers, copies;
    double bytes = 0, nanos = 0;
    uint64_t under_way = 0;  // bytes in flight
    // The link: `link_bytes` arrived in `link_nanos` while copies were in flight.
    double link_bytes = 0, link_nanos = 0;
    double measured_nanos = 0;  // total time of link measurements
    bool link_known = false;    // enough was measured
    storage::Nanos measured_at = 0;
    bool failed = false;  // the last call was not answered
    uint64_t failed_calls = 0, stalls = 0, used = 0;
  };
  std::map<std::string, Rate> rates_;
};

}  // namespace ashlar::daemon
