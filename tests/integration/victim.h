// SPDX-License-Identifier: Apache-2.0
// Victim: an engine whose calls are timed, alone and while others attack the daemon.
#pragma once

#include <chrono>
#include <vector>

#include "tests/integration/test_engine.h"

namespace ashlar::integration {

struct CallTimes {
  std::chrono::milliseconds p99{0}, slowest{0};
};

class Victim {
 public:
  // Publishes a prompt, and measures the time.
  explicit Victim(const ClientOptions& options);

  // A lookup and a landing are one call. A call that misses is a test failure.
  CallTimes Measure(int calls = kCalls);
  // Limits the effect of an attack: p99 is at most five times the p99 without it, plus 20 ms.
  void ExpectServed(int calls = kCalls);
  const CallTimes& alone() const { return alone_; }

 private:
  static constexpr int kCalls = 100;

  const std::vector<Tokens> prompt_ = MakePrompt(8, 2, 40);
  TestEngine engine_;
  CallTimes alone_;
};

}  // namespace ashlar::integration
