// SPDX-License-Identifier: Apache-2.0
// Schedule: when the requests of a trace arrive, for threads that serve them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <span>
#include <vector>

#include "kernels/mutex.h"

namespace ashlar::replay {

// Requests arrive in a Poisson stream in the order of the trace. A session's request arrives no earlier than the
// session's previous request has ended, because its prompt contains that answer. Thread-safe.
class Schedule {
 public:
  using Clock = std::chrono::steady_clock;
  struct Arrival {
    Clock::time_point at;
    size_t request = 0;
    bool operator>(const Arrival& other) const { return at > other.at; }
  };

  // `sessions`: one per request. The stream starts now; the same seed gives the same gaps.
  Schedule(std::span<const uint64_t> sessions, double requests_per_second, uint64_t seed = 1);

  // Waits for the next arrival. Empty: there are no more, or Stop was called.
  std::optional<Arrival> Next();
  void Ended(size_t request);
  void Stop();

 private:
  std::vector<Clock::time_point> arrivals_;     // indexed by request
  std::vector<std::optional<size_t>> next_of_;  // indexed by request: the next one of its session
  Mutex mutex_;
  CondVar changed_;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> waiting_ ABSL_GUARDED_BY(mutex_);
  size_t left_ ABSL_GUARDED_BY(mutex_);  // requests that have not been returned
};

}  // namespace ashlar::replay
