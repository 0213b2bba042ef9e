// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/lpt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kLptSecond = 1'000'000'000;

std::vector<LptWorker> Equal(size_t count, double rate = 1000) {
  return std::vector<LptWorker>(count, {.tokens_per_second = rate});
}

// The shortest possible time over all assignments, found by trying each.
storage::Nanos Optimum(const std::vector<uint64_t>& tokens, size_t workers, double rate) {
  double best = 1e300;
  std::vector<size_t> chosen(tokens.size(), 0);
  while (true) {
    std::vector<uint64_t> load(workers, 0);
    for (size_t i = 0; i < tokens.size(); ++i) load[chosen[i]] += tokens[i];
    best = std::min(best, static_cast<double>(*std::ranges::max_element(load)) / rate);
    size_t digit = 0;
    while (digit < chosen.size() && ++chosen[digit] == workers) chosen[digit++] = 0;
    if (digit == chosen.size()) return static_cast<storage::Nanos>(best * 1e9);
  }
}

TEST(PlanLpt, AssignsLongestFirst) {
  const std::vector<uint64_t> tokens = {1000, 4000, 3000, 2000};
  const LptPlan plan = PlanLpt(tokens, Equal(2));
  // 4000 | 3000, then 2000 to the second worker and 1000 to the first.
  EXPECT_EQ(plan.worker, (std::vector<size_t>{0, 0, 1, 1}));
  EXPECT_EQ(plan.ends, (std::vector<storage::Nanos>{5 * kLptSecond, 4 * kLptSecond, 3 * kLptSecond, 5 * kLptSecond}));
  EXPECT_EQ(plan.ends_at, 5 * kLptSecond);
}

TEST(PlanLpt, TheRequesterKeepsAllIfItIsAsFastAlone) {
  const std::vector<uint64_t> tokens = {1000, 1000};
  // The other worker is busy for longer than both segments take.
  std::vector<LptWorker> workers = Equal(2);
  workers[1].ready_in = 2 * kLptSecond;
  EXPECT_EQ(PlanLpt(tokens, workers).worker, (std::vector<size_t>{0, 0}));
  // Its results take as long as the requester's second segment.
  workers[1] = {.tokens_per_second = 1000, .delay = kLptSecond};
  EXPECT_EQ(PlanLpt(tokens, workers).worker, (std::vector<size_t>{0, 0}));
  workers[1].delay = kLptSecond / 2;
  EXPECT_EQ(PlanLpt(tokens, workers).worker, (std::vector<size_t>{0, 1}));
}

TEST(PlanLpt, RatesLoadsAndCapacityCount) {
  const std::vector<uint64_t> tokens = {1000, 1000, 1000, 1000};
  std::vector<LptWorker> workers = {{.tokens_per_second = 1000}, {.tokens_per_second = 4000}};
  EXPECT_EQ(std::ranges::count(PlanLpt(tokens, workers).worker, 1u), 3);
  workers[1].capacity = 1;
  EXPECT_EQ(std::ranges::count(PlanLpt(tokens, workers).worker, 1u), 1);
  workers[1].capacity = 0;
  EXPECT_EQ(std::ranges::count(PlanLpt(tokens, workers).worker, 1u), 0);
}

TEST(PlanLpt, ANodesCapacityIsSharedByItsWorkers) {
  const std::vector<uint64_t> tokens(10, 1000);
  std::vector<LptWorker> workers = Equal(5, 4000);
  workers[0].tokens_per_second = 0;
  for (size_t i = 1; i < workers.size(); ++i) workers[i].node = i < 4 ? 0 : 1;
  const size_t capacities[] = {4, 2};
  const LptPlan plan = PlanLpt(tokens, workers, capacities);
  EXPECT_EQ(std::ranges::count_if(plan.worker, [](size_t worker) { return worker >= 1 && worker < 4; }), 4);
  EXPECT_EQ(std::ranges::count(plan.worker, 4u), 2);
  EXPECT_EQ(std::ranges::count(plan.worker, LptPlan::kUnassigned), 4);
}

TEST(PlanLpt, AWorkerWithAnAbsurdRateGetsNothing) {
  const std::vector<uint64_t> tokens(8, 1000);
  const std::vector<LptWorker> workers = {{.tokens_per_second = 1000},
                                          {.tokens_per_second = 1e-300},
                                          {.tokens_per_second = 1e-300, .ready_in = kLongestCompute}};
  EXPECT_THAT(PlanLpt(tokens, workers).worker, testing::Each(0u));
  EXPECT_EQ(ComputeTime(1000, 1e-300), kLongestCompute);
  EXPECT_EQ(ComputeTime(UINT64_MAX, 1e300), 0);
  EXPECT_EQ(ComputeTime(500, 1000), kLptSecond / 2);
  // A requester without helpers gets all segments, and finishes eventually.
  const LptPlan slow = PlanLpt(tokens, std::vector<LptWorker>(1, {.tokens_per_second = 1e-300}));
  EXPECT_THAT(slow.ends, testing::Each(kLongestCompute));
}

TEST(PlanLpt, WarmUpWithoutWorkersAssignsNothing) {
  const std::vector<uint64_t> tokens = {1000, 2000};
  const std::vector<LptWorker> none = {{.tokens_per_second = 0}};
  const LptPlan plan = PlanLpt(tokens, none);
  EXPECT_THAT(plan.worker, testing::Each(LptPlan::kUnassigned));
  EXPECT_EQ(plan.ends_at, 0);
  // A worker that takes any segment gets as many as it has space for.
  const std::vector<LptWorker> one = {{.tokens_per_second = 0}, {.tokens_per_second = 10, .capacity = 1}};
  EXPECT_EQ(PlanLpt(tokens, one).worker, (std::vector<size_t>{LptPlan::kUnassigned, 1}));
}

TEST(PlanLpt, KeepsGrahamsBound) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    const size_t workers = 1 + random() % 4;
    std::vector<uint64_t> tokens(1 + random() % 7);
    for (uint64_t& one : tokens) one = 1 + random() % 5000;
    const LptPlan plan = PlanLpt(tokens, Equal(workers));
    std::vector<uint64_t> load(workers, 0);
    for (size_t i = 0; i < tokens.size(); ++i) load.at(plan.worker[i]) += tokens[i];
    const double longest = static_cast<double>(*std::ranges::max_element(load)) / 1000 * 1e9;
    EXPECT_NEAR(static_cast<double>(plan.ends_at), longest, 16);
    const double m = static_cast<double>(workers);
    const double bound = (4.0 / 3 - 1 / (3 * m)) * static_cast<double>(Optimum(tokens, workers, 1000));
    EXPECT_LE(longest, bound + 16);
  }
}

TEST(PlanLpt, IsDeterministic) {
  const std::vector<uint64_t> tokens(11, 2400);
  const LptPlan first = PlanLpt(tokens, Equal(8)), second = PlanLpt(tokens, Equal(8));
  EXPECT_EQ(first.worker, second.worker);
  EXPECT_EQ(first.ends_at, 4'800'000'000);  // two rounds of segments
}

}  // namespace
}  // namespace ashlar::daemon
