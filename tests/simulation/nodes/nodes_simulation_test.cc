// SPDX-License-Identifier: Apache-2.0
// Many seeds of several nodes; every planted bug is detected; a seed reproduces its failure.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "daemon/runtime/log.h"
#include "kernels/mutex.h"
#include "storage/testing/temporary_folder.h"
#include "tests/simulation/nodes/nodes.h"
#include "tests/simulation/progress.h"

namespace ashlar::simulation::nodes {
namespace {

constexpr char kTitle[] = "ashlar-nodes-1";
constexpr uint64_t kNoted = 16;    // seeds between two progress notes of a run in parts
constexpr uint64_t kEnough = 200;  // seeds that are enough to see every event
constexpr uint64_t kMostSeedsOfABug = 60;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::string Again(uint64_t seed) {
  return "ASHLAR_NODES_SEED=" + std::to_string(seed) + " ASHLAR_NODES_SEEDS=1";
}

// The oracle reports failures; the daemon's log would hide them.
void BeQuiet() {
  daemon::SetLogLevel("error");
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

struct SeedRun {
  uint64_t first = 0, trace = 0, done = 0;
  Reached reached;

  std::vector<uint64_t> Numbers() const {
    std::vector<uint64_t> numbers = {first, trace, done};
    numbers.insert(numbers.end(), reached.counts.begin(), reached.counts.end());
    return numbers;
  }
  // False: the file is of another first seed or another program.
  bool Load(const std::string& path) {
    if (!std::filesystem::exists(path)) return true;
    std::vector<uint64_t> numbers = Numbers();
    if (!LoadNumbers(path, kTitle, numbers) || numbers[0] != first || numbers[1] != trace) return false;
    done = numbers[2];
    std::copy(numbers.begin() + 3, numbers.end(), reached.counts.begin());
    return true;
  }
};

// Seeds [first + done, first + to) on all CPUs. Returns the broken promises.
std::vector<std::string> SimulateAll(SeedRun& run, uint64_t to) {
  std::atomic<uint64_t> next{run.done};
  std::atomic<bool> failed{false};
  struct {
    Mutex mutex;
    std::vector<std::string> lines ABSL_GUARDED_BY(mutex);
  } failures;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (uint64_t n = next++; n < to && !failed; n = next++) {
        const Report report = Simulate(run.first + n);
        MutexLock lock(failures.mutex);
        run.reached.Add(report.reached);
        if (report.failure.empty()) continue;
        failures.lines.push_back(Again(run.first + n) + ": at " + std::to_string(report.at_seconds) +
                                 " s: " + report.failure);
        failed = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  MutexLock lock(failures.mutex);
  if (failures.lines.empty()) run.done = to;
  return failures.lines;
}

// The same seeds every time, unless the environment asks otherwise:
// ASHLAR_NODES_SEED      the first seed
// ASHLAR_NODES_SEEDS     how many seeds there are in all
// ASHLAR_NODES_PROGRESS  a file that notes how many of them are done; the next run continues there
// ASHLAR_NODES_PART      with it: the number of seeds in this run
TEST(NodesSimulation, KeepsEveryPromiseForEverySeed) {
  BeQuiet();
  const uint64_t seeds = FromEnvironment("ASHLAR_NODES_SEEDS", ASHLAR_NODES_DEFAULT_SEEDS);
  const char* const file = std::getenv("ASHLAR_NODES_PROGRESS");
  SeedRun run{.first = FromEnvironment("ASHLAR_NODES_SEED", 1)};
  if (file != nullptr) {
    run.trace = Simulate(run.first).trace;
    ASSERT_TRUE(run.Load(file)) << file << ": of another program, or another first seed; remove it";
  }
  const uint64_t part = file == nullptr ? seeds : FromEnvironment("ASHLAR_NODES_PART", seeds);
  const uint64_t end = std::min(seeds, run.done + part);
  std::vector<std::string> failures;
  while (run.done < end && failures.empty()) {
    failures = SimulateAll(run, std::min(end, run.done + kNoted));
    if (file == nullptr || !failures.empty()) continue;
    ASSERT_TRUE(SaveNumbers(file, kTitle, run.Numbers())) << file << ": cannot be written";
    std::printf("%lu of %lu\n", static_cast<unsigned long>(run.done), static_cast<unsigned long>(seeds));
  }
  for (const std::string& failure : failures) ADD_FAILURE() << failure;
  std::printf("%lu of %lu seeds from %lu\n%s\n", static_cast<unsigned long>(run.done),
              static_cast<unsigned long>(seeds), static_cast<unsigned long>(run.first), run.reached.Describe().c_str());
  if (failures.empty() && run.done >= std::max<uint64_t>(seeds, kEnough)) {
    EXPECT_EQ(run.reached.Missing(), "");
  }
}

TEST(NodesSimulation, ASeedDeterminesTheRun) {
  BeQuiet();
  for (uint64_t seed = 1; seed <= 3; ++seed) EXPECT_EQ(Simulate(seed).trace, Simulate(seed).trace) << seed;
  EXPECT_NE(Simulate(1).trace, Simulate(2).trace);
}

TEST(NodesSimulation, ContinuesWhereItEnded) {
  const storage::TemporaryFolder folder;
  const std::string file = folder / "progress";
  SeedRun run{.first = 7, .trace = 70};
  ASSERT_TRUE(run.Load(file));
  run.done = 64;
  run.reached.counts[4] = 5;
  ASSERT_TRUE(SaveNumbers(file, kTitle, run.Numbers()));
  SeedRun again{.first = 7, .trace = 70};
  ASSERT_TRUE(again.Load(file));
  EXPECT_EQ(again.done, 64u);
  EXPECT_EQ(again.reached.counts, run.reached.counts);
  SeedRun other{.first = 7, .trace = 71};
  EXPECT_FALSE(other.Load(file)) << "of another program";
}

class InjectedBugOfNodes : public ::testing::TestWithParam<Bug> {};

TEST_P(InjectedBugOfNodes, IsDetected) {
  BeQuiet();
  std::string failure;
  uint64_t seed = 0;
  while (seed < kMostSeedsOfABug && failure.empty()) failure = Simulate(++seed, GetParam()).failure;
  EXPECT_NE(failure, "");
  std::printf("caught by seed %lu: %s\n", static_cast<unsigned long>(seed), failure.c_str());
}

constexpr const char* kBugNames[kBugs] = {"None",
                                          "FlipsLandedBits",
                                          "PublishesOtherText",
                                          "CrossesTenants",
                                          "SharesExtents",
                                          "NeverEndsLeases",
                                          "LosesWatchEvents",
                                          "LosesTransactions",
                                          "KeepsDeletedKeys",
                                          "ComesBackAsItself",
                                          "DropsCalls",
                                          "KeepsPeersGone",
                                          "DropsSends",
                                          "DropsDeadlines",
                                          "StopsClocks",
                                          "NeverTakesOffers",
                                          "ServesFormerNodes"};

std::vector<Bug> AllBugs() {
  std::vector<Bug> bugs;
  for (size_t bug = 1; bug < kBugs; ++bug) bugs.push_back(static_cast<Bug>(bug));
  return bugs;
}

INSTANTIATE_TEST_SUITE_P(Promises, InjectedBugOfNodes, ::testing::ValuesIn(AllBugs()),
                         [](const ::testing::TestParamInfo<Bug>& instance) {
                           return kBugNames[static_cast<size_t>(instance.param)];
                         });

}  // namespace
}  // namespace ashlar::simulation::nodes
