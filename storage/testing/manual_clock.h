// SPDX-License-Identifier: Apache-2.0
// Time that stands still until a test moves it.
#pragma once

#include "storage/executor.h"

namespace ashlar::storage {

class ManualClock final : public Clock {
 public:
  Nanos Now() const override { return now_; }
  void Advance(Nanos by) { now_ += by; }

 private:
  Nanos now_ = 1'000'000'000;
};

}  // namespace ashlar::storage
