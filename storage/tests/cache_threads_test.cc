// SPDX-License-Identifier: Apache-2.0
// The cache with real threads, for the sanitizers.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "kernels/host/thread_pool.h"
#include "kernels/kernels.h"
#include "storage/cache.h"
#include "storage/testing/engine.h"
#include "storage/testing/executors.h"
#include "storage/testing/manual_clock.h"
#include "storage/testing/rig.h"
#include "storage/transfer/mover.h"

namespace ashlar::storage {
namespace {

TEST(CacheThreads, TransfersRunConcurrently) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  constexpr SessionId kSession = 1;
  constexpr int kTexts = 12;
  const auto tier = TestTier({{1, 200}});
  ManualClock clock;
  kernels::ThreadPool workers(2);
  ThreadedExecutor executor(3);
  Mover mover(kernels::Host(), workers, executor, *tier);
  Cache cache({}, {.memory = {tier.get()}}, mover, executor, clock, nullptr);
  cache.OpenSession(kSession, 1);

  // Adds arenas while earlier publishes copy, and lands finished texts meanwhile.
  int published = 0;
  std::vector<Query> queries;
  for (uint64_t text = 1; text <= kTexts; ++text) {
    const ObjectHeader plan = TestPlan(text, 64 + 16 * text);
    queries.push_back({.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens});
    const auto reservation = cache.Reserve(kSession, plan);
    ASSERT_EQ(reservation.outcome, ReserveOutcome::kGranted);
    cache.Publish(kSession, reservation.id, TestSource(plan, text), [&](PublishOutcome outcome) {
      EXPECT_EQ(outcome, PublishOutcome::kPublished);
      ++published;
    });
  }
  executor.PollUntil([&] { return published == kTexts; });

  struct Landing {
    std::unique_ptr<TestPages> pages;
    std::optional<MissReason> verdict;
    bool quiesced = false, quiet = false;
  };
  std::vector<Landing> landings(40);
  const Match match = cache.Lookup(kSession, queries);
  for (size_t i = 0; i < landings.size(); ++i) {
    landings[i].pages = std::make_unique<TestPages>(20);
    cache.Land(kSession, i, match.lease,
               TestTarget(*landings[i].pages, {{static_cast<uint32_t>(i % kTexts), static_cast<uint64_t>(i)}}),
               {.progress = [](uint32_t) {},
                .done = [&landings, i](const std::vector<MissReason>& verdict) { landings[i].verdict = verdict[0]; }});
  }
  for (size_t i = 0; i < landings.size(); ++i) {
    if (random() % 3 != 0) continue;
    landings[i].quiesced = true;
    cache.Quiesce(kSession, i, [&landings, i] { landings[i].quiet = true; });
  }
  bool drained = false;
  executor.PollUntil([&] { return cache.stats().landings == 0; });
  cache.CloseSession(kSession, [&] { drained = true; });
  EXPECT_TRUE(drained);
  for (size_t i = 0; i < landings.size(); ++i) {
    ASSERT_TRUE(landings[i].verdict);
    EXPECT_EQ(landings[i].quiet, landings[i].quiesced);
    if (*landings[i].verdict != MissReason::kNone) {
      EXPECT_EQ(*landings[i].verdict, MissReason::kCancelled);
      EXPECT_TRUE(landings[i].quiesced);
      continue;
    }
    const uint64_t text = i % kTexts + 1;
    EXPECT_LT(LandingError(*landings[i].pages, TestPlan(text, 64 + 16 * text), text, i), 1e-5);
  }
}

TEST(CacheThreads, ASessionClosedDuringTransfersDrains) {
  constexpr SessionId kSession = 1;
  const auto tier = TestTier({{1, 64}});
  ManualClock clock;
  kernels::ThreadPool workers(2);
  ThreadedExecutor executor(2);
  Mover mover(kernels::Host(), workers, executor, *tier);
  Cache cache({}, {.memory = {tier.get()}}, mover, executor, clock, nullptr);
  cache.OpenSession(kSession, 1);
  const ObjectHeader plan = TestPlan(1, 64);
  bool published = false;
  cache.Publish(kSession, cache.Reserve(kSession, plan).id, TestSource(plan, 1),
                [&](PublishOutcome) { published = true; });
  executor.PollUntil([&] { return published; });

  const Query query{.kind = plan.kind, .key = plan.key, .ns = plan.ns, .tokens = plan.tokens};
  auto pages = std::make_unique<TestPages>(8);
  const Match match = cache.Lookup(kSession, {&query, 1});
  cache.Land(kSession, 1, match.lease, TestTarget(*pages, {{0, 0}}),
             {.progress = [](uint32_t) {}, .done = [](auto) {}});
  const ObjectHeader second = TestPlan(2, 200);
  cache.Publish(kSession, cache.Reserve(kSession, second).id, TestSource(second, 2), [](PublishOutcome) {});
  bool drained = false;
  cache.CloseSession(kSession, [&] { drained = true; });
  executor.PollUntil([&] { return drained; });
  pages.reset();  // unmapped, so that the sanitizers report a late write
  EXPECT_EQ(cache.stats().landings, 0u);
  EXPECT_EQ(cache.stats().reservations, 0u);
}

}  // namespace
}  // namespace ashlar::storage
