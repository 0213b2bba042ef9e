// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/schedule.h"

#include <algorithm>
#include <random>

#include "absl/container/flat_hash_map.h"

namespace ashlar::replay {

Schedule::Schedule(std::span<const uint64_t> sessions, double requests_per_second, uint64_t seed)
    : next_of_(sessions.size()), left_(sessions.size()) {
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> gap(requests_per_second);
  const Clock::time_point start = Clock::now();
  std::chrono::duration<double> at(0);
  absl::flat_hash_map<uint64_t, size_t> last;  // request of each session
  for (size_t request = 0; request < sessions.size(); ++request) {
    at += std::chrono::duration<double>(gap(random));
    arrivals_.push_back(start + std::chrono::duration_cast<Clock::duration>(at));
    const auto [previous, first] = last.try_emplace(sessions[request], request);
    if (first) {
      waiting_.push({arrivals_[request], request});
    } else {
      next_of_[std::exchange(previous->second, request)] = request;
    }
  }
}

std::optional<Schedule::Arrival> Schedule::Next() {
  MutexLock lock(mutex_);
  while (left_ > 0) {
    if (waiting_.empty()) {
      changed_.Wait(mutex_);
    } else if (const Arrival next = waiting_.top(); next.at > Clock::now()) {
      changed_.WaitUntil(mutex_, next.at);
    } else {
      waiting_.pop();
      if (--left_ == 0) changed_.NotifyAll();
      return next;
    }
  }
  return std::nullopt;
}

void Schedule::Ended(size_t request) {
  const std::optional<size_t> next = next_of_[request];
  if (!next.has_value()) return;
  MutexLock lock(mutex_);
  waiting_.push({std::max(arrivals_[*next], Clock::now()), *next});
  changed_.NotifyAll();
}

void Schedule::Stop() {
  MutexLock lock(mutex_);
  left_ = 0;
  changed_.NotifyAll();
}

}  // namespace ashlar::replay
