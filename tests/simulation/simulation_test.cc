// SPDX-License-Identifier: Apache-2.0
// Many seeds; every planted bug is detected; a seed reproduces its failure.
#include "tests/simulation/simulation.h"

#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "kernels/mutex.h"
#include "storage/testing/temporary_folder.h"
#include "tests/simulation/progress.h"

namespace ashlar::simulation {
namespace {

constexpr int kOperations = 1000;
constexpr uint64_t kNoted = 64;    // seeds between two progress notes of a run in parts
constexpr uint64_t kEnough = 400;  // seeds that are enough to see every event

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Returns the settings that run one seed again.
std::string Again(uint64_t seed) {
  return "ASHLAR_SIMULATION_SEED=" + std::to_string(seed) + " ASHLAR_SIMULATION_SEEDS=1";
}

// A process that crashes prints its seed.
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

// Objects and pages are too large for malloc to cache; freeing and allocating them again costs a sixth of a run.
void KeepFreedMemory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

// Seeds [first + from, first + to), on all CPUs. Adds to what was reached before, and returns the broken promises.
std::vector<std::string> SimulateAll(uint64_t first, uint64_t from, uint64_t to, Progress& progress) {
  std::atomic<uint64_t> next{from};
  std::atomic<bool> failed{false};
  struct {
    Mutex mutex;
    std::vector<std::string> lines ABSL_GUARDED_BY(mutex);
  } failures;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (uint64_t n = next++; n < to && !failed; n = next++) {
        const Report report = SimulateAloud(first + n);
        MutexLock lock(failures.mutex);
        progress.coverage.Add(report.coverage);
        progress.reached.Add(report.reached);
        progress.transitions.Add(report.transitions);
        if (report.failure.empty()) continue;
        failures.lines.push_back(Again(first + n) + ": step " + std::to_string(report.step) + ": " + report.failure);
        failed = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  MutexLock lock(failures.mutex);
  if (failures.lines.empty()) progress.done = to;
  return failures.lines;
}

// The same seeds every time, unless the environment says otherwise: developers should see their own mistakes, and look
// for others with different seeds. The environment's variables: ASHLAR_SIMULATION_SEED      the first seed
// ASHLAR_SIMULATION_SEEDS     how many seeds there are in all ASHLAR_SIMULATION_PROGRESS  a file that notes how many of
// them are done; the next run continues there ASHLAR_SIMULATION_PART      with it: the number of seeds in this run
TEST(Simulation, KeepsEveryPromiseForEverySeed) {
  const uint64_t first = FromEnvironment("ASHLAR_SIMULATION_SEED", 1);
  const uint64_t seeds = FromEnvironment("ASHLAR_SIMULATION_SEEDS", ASHLAR_SIMULATION_DEFAULT_SEEDS);
  const char* const file = std::getenv("ASHLAR_SIMULATION_PROGRESS");
  KeepFreedMemory();
  const auto abort_before = std::signal(SIGABRT, Die);
  const auto fault_before = std::signal(SIGSEGV, Die);
  Progress progress{.first = first};
  if (file != nullptr) {
    progress.trace = SimulateAloud(first).trace;
    ASSERT_TRUE(Load(file, progress)) << file << ": of another program, or another first seed; remove it";
  }
  const uint64_t part = file == nullptr ? seeds : FromEnvironment("ASHLAR_SIMULATION_PART", seeds);
  const uint64_t end = std::min(seeds, progress.done + part);
  std::vector<std::string> failures;
  while (progress.done < end && failures.empty()) {
    const uint64_t from = progress.done, to = std::min(end, file == nullptr ? end : from + kNoted);
    failures = SimulateAll(first, from, to, progress);
    if (file == nullptr || !failures.empty()) continue;
    ASSERT_TRUE(Save(file, progress)) << file << ": cannot be written";
  }
  std::signal(SIGABRT, abort_before);
  std::signal(SIGSEGV, fault_before);
  for (const std::string& failure : failures) ADD_FAILURE() << failure;
  std::printf("%lu of %lu seeds of %d operations from %lu\n", static_cast<unsigned long>(progress.done),
              static_cast<unsigned long>(seeds), kOperations, static_cast<unsigned long>(first));
  std::printf("%s\n", progress.reached.Describe().c_str());
  if (failures.empty() && progress.done >= std::max<uint64_t>(seeds, kEnough)) {
    EXPECT_EQ(progress.coverage.Missing(), "");
    EXPECT_EQ(progress.reached.Missing(), "");
    EXPECT_EQ(progress.transitions.Missing(), "");
  }
}

TEST(Simulation, ContinuesWhereItEnded) {
  const storage::TemporaryFolder folder;
  const std::string file = folder / "progress";
  Progress progress{.first = 7, .trace = 70};
  ASSERT_TRUE(Load(file, progress));
  progress.done = 64;
  progress.coverage.pairs[1][2] = 3;
  progress.reached.counts[4] = 5;
  progress.transitions.counts[6] = 7;
  ASSERT_TRUE(Save(file, progress));
  Progress again{.first = 7, .trace = 70};
  ASSERT_TRUE(Load(file, again));
  EXPECT_EQ(again.done, 64u);
  EXPECT_EQ(again.coverage.pairs, progress.coverage.pairs);
  EXPECT_EQ(again.reached.counts, progress.reached.counts);
  EXPECT_EQ(again.transitions.counts, progress.transitions.counts);
  Progress other{.first = 7, .trace = 71};
  EXPECT_FALSE(Load(file, other)) << "of another program";
}

TEST(Simulation, ASeedDeterminesTheRun) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    EXPECT_EQ(Simulate(seed, kOperations).trace, Simulate(seed, kOperations).trace) << seed;
  }
  EXPECT_NE(Simulate(1, kOperations).trace, Simulate(2, kOperations).trace);
}

class InjectedBug : public ::testing::TestWithParam<Bug> {};

TEST_P(InjectedBug, IsDetected) {
  std::string failure;
  for (uint64_t seed = 1; seed <= 400 && failure.empty(); ++seed) {
    failure = Simulate(seed, kOperations, GetParam()).failure;
  }
  EXPECT_NE(failure, "");
  std::printf("caught: %s\n", failure.c_str());
}

constexpr const char* kBugNames[] = {"None",
                                     "FlipsLandedBits",
                                     "CrossesTenants",
                                     "SharesExtents",
                                     "NeverFrees",
                                     "IgnoresBudgets",
                                     "LosesFlushes",
                                     "DropsCompletions",
                                     "CommitsOtherStates",
                                     "ShiftsSpans",
                                     "MixesConversations",
                                     "ComposesInAnotherOrder",
                                     "WritesRefusedStates",
                                     "DropsPagePins",
                                     "DropsDeadlines",
                                     "ExpiresEarly",
                                     "ServesInOrder",
                                     "IgnoresShares",
                                     "DropsSlices",
                                     "RefusesProbes",
                                     "ErasesTooEarly",
                                     "HidesHangs"};

std::vector<Bug> AllBugs() {
  std::vector<Bug> bugs;
  for (size_t bug = 1; bug < std::size(kBugNames); ++bug) bugs.push_back(static_cast<Bug>(bug));
  return bugs;
}

INSTANTIATE_TEST_SUITE_P(Promises, InjectedBug, ::testing::ValuesIn(AllBugs()),
                         [](const ::testing::TestParamInfo<Bug>& instance) {
                           return kBugNames[static_cast<size_t>(instance.param)];
                         });

}  // namespace
}  // namespace ashlar::simulation
