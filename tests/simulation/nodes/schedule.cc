// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/schedule.h"

#include <algorithm>
#include <utility>

namespace ashlar::simulation::nodes {

void Schedule::After(Nanos wait, std::function<void()> event) {
  heap_.push_back({now_ + std::max<Nanos>(wait, 0), drawn_++, std::move(event)});
  std::ranges::push_heap(heap_, Later);
}

void Schedule::For(const std::shared_ptr<Life>& life, Nanos wait, std::function<void()> event) {
  After(wait, [this, life = std::weak_ptr(life), event = std::move(event)] { RunFor(*this, life, event); });
}

void Schedule::RunFor(Schedule& schedule, const std::weak_ptr<Life>& life, const std::function<void()>& event) {
  const std::shared_ptr<Life> lives = life.lock();
  if (lives == nullptr || lives->ended) return;
  if (lives->frozen_until <= schedule.now()) return event();
  schedule.After(lives->frozen_until - schedule.now(), [&schedule, life, event] { RunFor(schedule, life, event); });
}

bool Schedule::RunNext(Nanos end) {
  if (heap_.empty() || heap_.front().at > end) {
    now_ = std::max(now_, end);
    return false;
  }
  std::ranges::pop_heap(heap_, Later);
  const Event next = std::move(heap_.back());
  heap_.pop_back();
  now_ = next.at;
  next.run();
  return true;
}

Nanos MachineClock::Until(Nanos at) const {
  if (at == INT64_MAX) return INT64_MAX;
  const double wait = static_cast<double>(at - Now()) / rate_;
  return wait <= 0 ? 0 : static_cast<Nanos>(wait) + 1;
}

}  // namespace ashlar::simulation::nodes
