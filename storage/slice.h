// SPDX-License-Identifier: Apache-2.0
// Slice: the amount of work that a long call may do now. Such a call does some steps and continues when it is called
// again; meanwhile the thread does other work.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "storage/executor.h"

namespace ashlar::storage {

class Slice {
 public:
  // Unlimited.
  Slice() = default;
  // A slice of `steps`, at least one: for tests and simulators.
  explicit Slice(size_t steps, std::function<void()> resume = nullptr)
      : resume_(std::move(resume)), steps_left_(steps) {}
  // A slice until the clock shows `end`, with a minimum number of steps. `resume`: see below.
  Slice(const Clock& clock, Nanos end, std::function<void()> resume = nullptr)
      : clock_(&clock), end_(end), resume_(std::move(resume)) {}

  // Takes a step: one lookup, or a few smaller operations. Returns false at the end of the slice.
  bool Take() {
    if (steps_left_ == 0) return false;
    if (clock_ != nullptr && ++taken_ % kAskedEvery == 0 && clock_->Now() >= end_) {
      steps_left_ = 0;
      return false;
    }
    if (steps_left_ != SIZE_MAX) --steps_left_;
    return true;
  }

  // The call waits for an event, and ends its slice by Wait. It is called again after `resume`, which the event calls
  // later. Empty if the call cannot wait.
  const std::function<void()>& resume() const { return resume_; }
  void Wait() { waits_ = true; }
  bool waits() const { return waits_; }

 private:
  static constexpr size_t kAskedEvery = 8;  // steps between clock reads, because a read costs a fraction of a step

  const Clock* const clock_ = nullptr;
  const Nanos end_ = 0;
  const std::function<void()> resume_;
  bool waits_ = false;
  size_t steps_left_ = SIZE_MAX;
  size_t taken_ = 0;
};

}  // namespace ashlar::storage
