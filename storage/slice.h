// SPDX-License-Identifier: Apache-2.0
// Slice: how much of a long call may be done now. Such a call does some steps and continues when it is called again;
// meanwhile the thread serves others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/executor.h"

namespace ashlar::storage {

class Slice {
 public:
  // All of it.
  Slice() = default;
  // A slice of so many steps, at least one: for tests and simulators.
  explicit Slice(size_t steps) : steps_left_(steps) {}
  // A slice until the clock shows `end`, but with at least the first steps.
  Slice(const Clock& clock, Nanos end) : clock_(&clock), end_(end) {}

  // Takes the time for a step: one look-up, or a few smaller things. False: the slice is over.
  bool Take() {
    if (steps_left_ == 0) return false;
    if (clock_ != nullptr && ++taken_ % kAskedEvery == 0 && clock_->Now() >= end_) {
      steps_left_ = 0;
      return false;
    }
    if (steps_left_ != SIZE_MAX) --steps_left_;
    return true;
  }

 private:
  static constexpr size_t kAskedEvery = 8;  // steps: to ask a clock takes a part of one

  const Clock* const clock_ = nullptr;
  const Nanos end_ = 0;
  size_t steps_left_ = SIZE_MAX;
  size_t taken_ = 0;
};

}  // namespace ashlar::storage
