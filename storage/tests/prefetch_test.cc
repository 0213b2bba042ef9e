// SPDX-License-Identifier: Apache-2.0
// Objects that are matched before they are needed are promoted after those needed sooner, and before those that no
// request waits for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "storage/testing/tenants.h"
#include "storage/testing/tiered_rig.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
constexpr Nanos kSecond = 1'000'000'000;

class PrefetchTest : public ::testing::Test {
 protected:
  PrefetchTest() : rig_({.hbm = 0, .dram = 100, .ssd = 200}) {
    rig_.cache->OpenSession(kAnn, 1);
    for (const uint64_t text : {1, 2, 3}) EXPECT_TRUE(rig_.Publish(kAnn, Plan(text), text));
    rig_.Settle();
    rig_.Restart();  // now only the disk has them
    rig_.cache->OpenSession(kAnn, 1);
    rig_.observer.copied.clear();
    rig_.io.set_capacity(1);  // a disk that does one operation at a time
  }
  ~PrefetchTest() override {
    rig_.cache->CloseSession(kAnn, [] {});
    rig_.Settle();
  }

  // Five pieces each.
  static ObjectHeader Plan(uint64_t text) { return TestPlan(text, 4000); }
  Match Ask(uint64_t text, Nanos needed_in, Nanos recompute = 0) {
    const ObjectHeader plan = Plan(text);
    const Query query{.kind = plan.kind,
                      .key = plan.key,
                      .tokens = plan.tokens,
                      .recompute = recompute,
                      .needed_at = rig_.clock.Now() + needed_in};
    return rig_.cache->Lookup(kAnn, {&query, 1});
  }
  bool Up(uint64_t text) {
    return rig_.cache->upkeep().inventory().Where(1, Plan(text).key).front() == TierKind::kDram;
  }
  // Returns the promoted texts, in the order of promotion.
  std::vector<uint64_t> UntilIdle() {
    std::vector<uint64_t> order;
    while (rig_.io.pending() > 0) {
      rig_.io.Complete(0);
      for (const uint64_t text : {1, 2, 3}) {
        if (std::ranges::count(order, text) == 0 && Up(text)) order.push_back(text);
      }
    }
    return order;
  }

  TieredRig rig_;
};

TEST_F(PrefetchTest, LoadsEarlierNeedFirst) {
  Ask(1, 3 * kSecond);  // and its first piece is in flight at once
  Ask(2, 2 * kSecond);
  Ask(3, 0);
  EXPECT_THAT(UntilIdle(), ElementsAre(3, 2, 1));
  EXPECT_THAT(rig_.observer.prefetched, ElementsAre(true, true)) << "what was needed at once is no prefetch";
}

TEST_F(PrefetchTest, EqualNeedsLoadInRequestOrder) {
  for (const uint64_t text : {2, 3, 1}) Ask(text, kSecond);
  EXPECT_THAT(UntilIdle(), ElementsAre(2, 3, 1));
}

TEST_F(PrefetchTest, AnEarlierNeedMovesALoadForward) {
  Ask(1, kSecond);
  Ask(2, 2 * kSecond);
  Ask(3, 3 * kSecond);
  Ask(3, 0);
  Ask(2, 9 * kSecond);  // which changes nothing
  EXPECT_THAT(UntilIdle(), ElementsAre(3, 1, 2));
  EXPECT_EQ(rig_.observer.copied.size(), 3u) << "each came up once";
}

TEST_F(PrefetchTest, AWaitingLandingMovesALoadForward) {
  Ask(1, kSecond);
  const Match match = Ask(2, 2 * kSecond);
  const TestPages pages(260);
  const auto landing = rig_.StartLanding(kAnn, 1, match.lease, TestTarget(pages, {{0, 7}}));
  EXPECT_THAT(UntilIdle(), ElementsAre(2, 1));
  rig_.Settle();
  EXPECT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
}

TEST_F(PrefetchTest, PrefetchYieldsToNeededLoads) {
  ASSERT_TRUE(rig_.Publish(kAnn, Plan(4), 4));
  ASSERT_EQ(rig_.io.pending(), 1u) << "it is being written";
  Ask(1, 9 * kSecond);
  while (!Up(1)) rig_.io.Complete(0);
  EXPECT_THAT(rig_.cache->upkeep().inventory().Where(1, Plan(4).key), ElementsAre(TierKind::kDram));
  UntilIdle();
  EXPECT_THAT(rig_.cache->upkeep().inventory().Where(1, Plan(4).key), ElementsAre(TierKind::kDram, TierKind::kSsd));
}

TEST_F(PrefetchTest, ALeaseExpiresAfterItsTimeOfNeed) {
  const Match match = Ask(1, 100 * kSecond);
  rig_.Settle();
  const auto held_after = [&](Nanos passed) {
    rig_.clock.Advance(passed);
    rig_.cache->Tick();
    return rig_.cache->Held(kAnn, match.lease).ok();
  };
  EXPECT_TRUE(held_after(159 * kSecond));
  EXPECT_FALSE(held_after(kSecond));
}

TEST_F(PrefetchTest, CountsLatePrefetches) {
  Ask(1, kSecond);
  rig_.clock.Advance(kSecond + 1);
  UntilIdle();
  EXPECT_THAT(rig_.observer.prefetched, ElementsAre(false));
}

TEST_F(PrefetchTest, EarlyRequestMakesSlowLoadProfitable) {
  Ask(1, 0);
  rig_.clock.Advance(kSecond);
  UntilIdle();
  EXPECT_EQ(Ask(2, 0, kSecond / 2).found[0].reason, MissReason::kSlowerThanRecompute);
  EXPECT_EQ(Ask(2, kSecond / 4, kSecond / 2).found[0].reason, MissReason::kSlowerThanRecompute);
  EXPECT_EQ(Ask(2, kSecond / 2, kSecond / 2).found[0].reason, MissReason::kNone);
  rig_.clock.Advance(60 * kSecond);  // a copy requested ahead of need says nothing about the time of copying
  UntilIdle();
  EXPECT_EQ(Ask(3, 0, kSecond).found[0].reason, MissReason::kNone);
}

}  // namespace
}  // namespace ashlar::storage
