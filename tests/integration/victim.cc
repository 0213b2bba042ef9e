// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/victim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "tests/integration/daemon_process.h"

namespace ashlar::integration {

using std::chrono::milliseconds;

Victim::Victim(const ClientOptions& options) : engine_(options) {
  engine_.PublishPrompt(prompt_);
  alone_ = Measure();
}

CallTimes Victim::Measure(int calls) {
  std::vector<milliseconds> times;
  for (int i = 0; i < calls; ++i) {
    const auto begun = std::chrono::steady_clock::now();
    EXPECT_THAT(engine_.Land(engine_.Lookup(prompt_), prompt_).Wait(kPatience), testing::Each(MissReason::kNone));
    times.push_back(std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - begun));
  }
  std::ranges::sort(times);
  return {.p99 = times[times.size() * 99 / 100 - 1], .slowest = times.back()};
}

void Victim::ExpectServed(int calls) {
  const CallTimes attacked = Measure(calls);
  EXPECT_LE(attacked.p99, 5 * alone_.p99 + milliseconds(20));
  std::printf("p99 of calls: alone %d ms, attacked %d ms\n", static_cast<int>(alone_.p99.count()),
              static_cast<int>(attacked.p99.count()));
}

}  // namespace ashlar::integration
