// Many seeds, every bug, and that a seed is all that it takes to see a failure again.
#include "tests/simulation/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace ashlar::simulation {
namespace {

constexpr int kOperations = 1000;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// ASHLAR_SIMULATION_SEED: the first seed; ASHLAR_SIMULATION_SEEDS: how many. The same ones every time, unless asked
// otherwise: who changes the cache should see his own mistakes, and look for others' with seeds of his own.
TEST(Simulation, KeepsEveryPromiseForEverySeed) {
  const uint64_t first = FromEnvironment("ASHLAR_SIMULATION_SEED", 1);
  const uint64_t seeds = FromEnvironment("ASHLAR_SIMULATION_SEEDS", ASHLAR_SIMULATION_DEFAULT_SEEDS);
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  Coverage coverage;
  std::vector<std::string> failures;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (uint64_t n = next++; n < seeds && failures.empty(); n = next++) {
        const Report report = Simulate(first + n, kOperations);
        const std::lock_guard lock(mutex);
        coverage.Add(report.coverage);
        if (report.failure.empty()) continue;
        failures.push_back("ASHLAR_SIMULATION_SEED=" + std::to_string(first + n) + " ASHLAR_SIMULATION_SEEDS=1: step " +
                           std::to_string(report.step) + ": " + report.failure);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) ADD_FAILURE() << failure;
  std::printf("%lu seeds of %d operations from %lu\n", static_cast<unsigned long>(seeds), kOperations,
              static_cast<unsigned long>(first));
  if (failures.empty() && seeds >= 200) {
    EXPECT_EQ(coverage.Missing(), "");
  }
}

TEST(Simulation, ASeedIsTheWholeStory) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    EXPECT_EQ(Simulate(seed, kOperations).trace, Simulate(seed, kOperations).trace) << seed;
  }
  EXPECT_NE(Simulate(1, kOperations).trace, Simulate(2, kOperations).trace);
}

class InjectedBug : public ::testing::TestWithParam<Bug> {};

TEST_P(InjectedBug, IsCaught) {
  std::string failure;
  for (uint64_t seed = 1; seed <= 40 && failure.empty(); ++seed) {
    failure = Simulate(seed, kOperations, GetParam()).failure;
  }
  EXPECT_NE(failure, "");
  std::printf("caught: %s\n", failure.c_str());
}

std::string BugName(const ::testing::TestParamInfo<Bug>& info) {
  static constexpr const char* kNames[] = {"None",       "FlipsLandedBits", "CrossesTenants", "SharesExtents",
                                           "NeverFrees", "IgnoresBudgets",  "LosesFlushes",   "DropsCompletions"};
  return kNames[static_cast<size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Promises, InjectedBug,
                         ::testing::Values(Bug::kFlipsLandedBits, Bug::kCrossesTenants, Bug::kSharesExtents,
                                           Bug::kNeverFrees, Bug::kIgnoresBudgets, Bug::kLosesFlushes,
                                           Bug::kDropsCompletions),
                         BugName);

}  // namespace
}  // namespace ashlar::simulation
