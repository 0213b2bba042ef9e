// SPDX-License-Identifier: Apache-2.0
// Deadline: the time of CLOCK_MONOTONIC at which a call returns at the latest.
#pragma once

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdint>

namespace ashlar::internal {

using Deadline = std::chrono::steady_clock::time_point;

inline Deadline After(std::chrono::milliseconds timeout) {
  const Deadline now = std::chrono::steady_clock::now();
  const auto longest = std::chrono::duration_cast<std::chrono::milliseconds>(Deadline::max() - now);
  return timeout >= longest ? Deadline::max() : now + timeout;
}

inline bool Passed(Deadline deadline) {
  return std::chrono::steady_clock::now() >= deadline;
}

// Returns the time left for poll(2), rounded up, so that a wait never ends just before the deadline and spins.
inline int PollTimeout(Deadline deadline) {
  const auto left = deadline - std::chrono::steady_clock::now();
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  return static_cast<int>(std::clamp<int64_t>(milliseconds, 0, INT_MAX));
}

// This process's CLOCK_MONOTONIC. The daemon's may differ (SessionChannel::InDaemonsClock).
inline int64_t MonotonicNanos(Deadline deadline) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
}

}  // namespace ashlar::internal
