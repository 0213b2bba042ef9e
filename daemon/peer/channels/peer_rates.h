// SPDX-License-Identifier: Apache-2.0
// PeerRates: how long answers and copies from each other node take, as measured.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "daemon/runtime/round_trips.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// The metadata thread only. The latest measurements count most; copies count by their bytes.
class PeerRates {
 public:
  // A call was answered after so long.
  void Answered(const std::string& node, storage::Nanos took);
  // A call was not answered. The node is not asked again until it has answered another call (PeerProbes).
  void Failed(const std::string& node);
  void Healed(const std::string& node) { rates_[node].failed = false; }
  bool MayAsk(const std::string& node) const;
  // Nodes that failed to answer and have not answered since.
  std::set<std::string> Failing() const;
  // Erases nodes that are not among these, once no copy from them is under way.
  void Keep(const std::set<std::string>& nodes);

  // A copy of so many bytes begins, and ends, whatever became of it.
  void Begins(const std::string& node, uint64_t bytes, storage::Nanos now);
  void Ends(const std::string& node, uint64_t bytes, storage::Nanos now);
  // So many bytes of the copies under way have come since the last call.
  void Moved(const std::string& node, uint64_t bytes, storage::Nanos now);
  // So many bytes came in so long, waiting for others' bytes included.
  void Came(const std::string& node, uint64_t bytes, storage::Nanos took);
  // The node's bytes were those that were used.
  void Used(const std::string& node, uint64_t bytes) { rates_[node].used += bytes; }
  // A copy that began then was given up: until one comes, more are waited for longer.
  void GaveUp(const std::string& node, storage::Nanos began, storage::Nanos now);

  struct Figures {
    double bytes_per_second = 0;  // of single copies, as Estimate takes it; 0: none has come yet
    storage::Nanos journey = 0;   // of a call and its answer; 0: none was answered
    uint64_t failed_calls = 0;    // that were not answered, ever
    uint64_t stalls = 0;          // copies that were given up, ever
    uint64_t bytes = 0;           // that came and were used, ever
  };
  Figures Of(const std::string& node) const;

  // Estimates the time until an object that is asked for now is here. 0: nothing is known of the node yet.
  storage::Nanos Estimate(const std::string& node, uint64_t bytes) const;
  // The time of the bytes alone, from what all copies together brought in a second, which does not depend on how many
  // share the link. Without the call that asks for them: objects share it, and copies overlap. Of
  // copies under way it counts at best: a message more than has come. 0: not enough has been measured lately.
  storage::Nanos Transfer(const std::string& node, uint64_t bytes, storage::Nanos now) const;
  // How long a copy of so many bytes that begins now is waited for: `factor` times what it should take behind those
  // that are under way, and a connection that may have to be made.
  storage::Nanos Patience(const std::string& node, uint64_t bytes, double factor,
                          const RoundTrips::Bounds& bounds) const;

 private:
  static constexpr double kKept = 0.9;                              // of earlier measurements at each new one
  static constexpr double kLinkBytes = 16 << 20, kLinkNanos = 1e9;  // of the link that are remembered
  static constexpr storage::Nanos kFresh = 10'000'000'000;          // then the link is measured anew
  static constexpr double kLeastNanos = 50e6;

  struct Rate {
    RoundTrips answers, copies;
    double bytes = 0, nanos = 0;
    uint64_t under_way = 0;  // bytes
    // The link: bytes that came in so long, while copies were under way.
    double link_bytes = 0, link_nanos = 0;
    double measured_nanos = 0;  // of the link, in all
    bool link_known = false;    // enough was measured
    storage::Nanos measured_at = 0;
    bool failed = false;  // the last call was not answered
    uint64_t failed_calls = 0, stalls = 0, used = 0;
  };
  std::map<std::string, Rate> rates_;
};

}  // namespace ashlar::daemon
