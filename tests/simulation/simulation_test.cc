// Many seeds, every bug, and that a seed is all that it takes to see a failure again.
#include "tests/simulation/simulation.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace ashlar::simulation {
namespace {

constexpr int kOperations = 1000;
constexpr uint64_t kTold = 10000;  // seeds between two lines about how far a long run is

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// What to set in order to see one seed again.
std::string Again(uint64_t seed) {
  return "ASHLAR_SIMULATION_SEED=" + std::to_string(seed) + " ASHLAR_SIMULATION_SEEDS=1";
}

// A process that dies of a seed says of which.
thread_local char dying_words[128];

void Die(int signal) {
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, dying_words, std::strlen(dying_words));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

Report SimulateAloud(uint64_t seed) {
  std::snprintf(dying_words, sizeof dying_words, "%s: dies\n", Again(seed).c_str());
  const Report report = Simulate(seed, kOperations);
  dying_words[0] = '\0';
  return report;
}

// Objects and pages are too large for malloc to keep them for the next one by itself; giving them back and taking them
// anew costs a sixth of a run.
void KeepFreedMemory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

// ASHLAR_SIMULATION_SEED: the first seed; ASHLAR_SIMULATION_SEEDS: how many. The same ones every time, unless asked
// otherwise: who changes the cache should see his own mistakes, and look for others' with seeds of his own.
TEST(Simulation, KeepsEveryPromiseForEverySeed) {
  const uint64_t first = FromEnvironment("ASHLAR_SIMULATION_SEED", 1);
  const uint64_t seeds = FromEnvironment("ASHLAR_SIMULATION_SEEDS", ASHLAR_SIMULATION_DEFAULT_SEEDS);
  KeepFreedMemory();
  const auto abort_before = std::signal(SIGABRT, Die);
  const auto fault_before = std::signal(SIGSEGV, Die);
  std::atomic<uint64_t> next{0};
  uint64_t finished = 0;
  std::atomic<bool> failed{false};
  std::mutex mutex;
  Coverage coverage;
  std::vector<std::string> failures;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (uint64_t n = next++; n < seeds && !failed; n = next++) {
        const Report report = SimulateAloud(first + n);
        const std::lock_guard lock(mutex);
        coverage.Add(report.coverage);
        if (++finished % kTold == 0) std::fprintf(stderr, "%" PRIu64 " of %" PRIu64 " seeds\n", finished, seeds);
        if (report.failure.empty()) continue;
        failures.push_back(Again(first + n) + ": step " + std::to_string(report.step) + ": " + report.failure);
        failed = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::signal(SIGABRT, abort_before);
  std::signal(SIGSEGV, fault_before);
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
