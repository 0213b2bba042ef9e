// SPDX-License-Identifier: Apache-2.0
// RoundTrips: measures the reply times of another process, and derives the time limit of the next call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "storage/executor.h"

namespace ashlar::daemon {

// Mean and deviation as in TCP (RFC 6298), with more weight on recent replies. One thread at a time.
class RoundTrips {
 public:
  struct Bounds {
    storage::Nanos least = 0, most = 0;
  };

  void Answered(storage::Nanos took) {
    const double sample = static_cast<double>(took);
    const double error = mean_ > 0 ? sample - mean_ : sample / 2;
    deviation_ += mean_ > 0 ? ((error < 0 ? -error : error) - deviation_) / 4 : error;
    mean_ += mean_ > 0 ? error / 8 : sample;
    doublings_ = 0;
  }
  // A call that began at `began` timed out. Of several concurrent ones, one counts.
  void Unanswered(storage::Nanos began, storage::Nanos now) {
    if (began < doubled_at_) return;
    doubled_at_ = now;
    doublings_ = std::min(doublings_ + 1, kMostDoublings);
  }

  storage::Nanos mean() const { return static_cast<storage::Nanos>(mean_); }  // 0 if unknown
  // The longest time of a single reply, without losses on the network.
  storage::Nanos Late() const { return static_cast<storage::Nanos>(mean_ + 4 * deviation_); }
  // Returns the measured value `usual` within the bounds, doubled for each unanswered call.
  storage::Nanos Limit(storage::Nanos usual, const Bounds& bounds) const {
    const double longer = static_cast<double>(std::max(usual, bounds.least)) * static_cast<double>(1 << doublings_);
    return longer < static_cast<double>(bounds.most) ? static_cast<storage::Nanos>(longer) : bounds.most;
  }
  // Time limit of a call: its reply, a new connection, and retransmissions.
  storage::Nanos Limit(const Bounds& bounds) const { return Limit(kTripsOfACall * Late(), bounds); }

 private:
  static constexpr storage::Nanos kTripsOfACall = 4;
  static constexpr int kMostDoublings = 10;

  double mean_ = 0, deviation_ = 0;
  int doublings_ = 0;
  storage::Nanos doubled_at_ = 0;
};

}  // namespace ashlar::daemon
