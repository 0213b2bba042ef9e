// SPDX-License-Identifier: Apache-2.0
// Policies over the tiers: admission, floors, pins, expiry, and the break-even check.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/testing/tiers_fixture.h"

namespace ashlar::storage {
namespace {

using limits::kExtentBytes;
using ::testing::ElementsAre;
using ::testing::SizeIs;

class TierPoliciesTest : public TiersTest {};

TEST_F(TierPoliciesTest, AnUnprofitableHitIsDeclined) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2, 3}) PublishAndSettle(text);
  const ObjectHeader plan = Plan(1);
  Query query{.kind = plan.kind, .key = plan.key, .tokens = plan.tokens, .recompute = 1000};
  Match match = rig_->cache->Lookup(kSession, {&query, 1});
  EXPECT_EQ(match.found[0].reason, MissReason::kNone) << "no load was measured yet";
  rig_->clock.Advance(2000);
  rig_->Settle();
  rig_->cache->Release(kSession, match.lease);
  PublishAndSettle(4);  // in its place
  EXPECT_EQ(rig_->cache->Lookup(kSession, {&query, 1}).found[0].reason, MissReason::kSlowerThanRecompute);
  query.recompute = 2000;
  match = rig_->cache->Lookup(kSession, {&query, 1});
  EXPECT_EQ(match.found[0].tier, TierKind::kSsd);
  rig_->Settle();
  rig_->cache->Release(kSession, match.lease);
  query.recompute = 1;
  match = rig_->cache->Lookup(kSession, {&query, 1});
  EXPECT_EQ(match.found[0].tier, TierKind::kDram) << "what is there costs nothing to bring up";
  rig_->cache->Release(kSession, match.lease);
}

// The time for which a landing waits for promotion counts as the copy's, not as its own.
TEST_F(TierPoliciesTest, ACopyAndALandingAreMeasuredOnceEach) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  const ObjectHeader plan = Plan(1);
  Query query{.kind = plan.kind, .key = plan.key, .tokens = plan.tokens};
  Match match = rig_->cache->Lookup(kSession, {&query, 1});
  const TestPages pages(16);
  const auto landing = rig_->StartLanding(kSession, 77, match.lease, TestTarget(pages, {{0, 100}}));
  rig_->clock.Advance(5000);
  rig_->io.CompleteAll();
  rig_->clock.Advance(2000);
  rig_->Settle();
  ASSERT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
  rig_->cache->Release(kSession, match.lease);
  const auto ask = [&](Nanos recompute) {
    query.recompute = recompute;
    const Match asked = rig_->cache->Lookup(kSession, {&query, 1});
    rig_->cache->Release(kSession, asked.lease);
    return asked.found[0].reason;
  };
  EXPECT_EQ(ask(2001), MissReason::kNone) << "it is at the top";
  EXPECT_EQ(ask(1999), MissReason::kSlowerThanRecompute);
  EXPECT_EQ(rig_->cache->explainer().LastMisses(1, 1)[0].why.present->tier, TierKind::kDram);
  PublishAndSettle(3);  // in its place
  EXPECT_EQ(ask(6999), MissReason::kSlowerThanRecompute);
  EXPECT_EQ(ask(7001), MissReason::kNone);
}

// The disk has object 1, which saves much but is loaded quickly; object 4 would have to be computed.
TEST_F(TierPoliciesTest, MemoryEvictsTheObjectThatTheDiskLoadsFaster) {
  Make({.hbm = 0, .dram = 7, .ssd = 64, .admission = AdmissionMode::kSecondUse});
  const auto use = [&](uint64_t text, double flops) {
    const ObjectHeader plan = Plan(text);
    const Nanos recompute = static_cast<Nanos>(flops / 1000);
    const Query query{
        .kind = plan.kind, .key = plan.key, .tokens = plan.tokens, .recompute = recompute, .flops = flops};
    const Match match = rig_->cache->Lookup(kSession, {&query, 1});
    rig_->clock.Advance(1);
    rig_->Settle();
    rig_->cache->Release(kSession, match.lease);
    return match.found[0].tier;
  };
  PublishAndSettle(1);
  use(1, 1e9);
  rig_->Settle();
  ASSERT_EQ(Used(*rig_->ssd), 3u);
  for (const uint64_t text : {3, 4}) PublishAndSettle(text);
  ASSERT_EQ(use(1, 1e9), TierKind::kSsd) << "now it is known how long loading takes";
  PublishAndSettle(5);
  EXPECT_EQ(Ask(4).tier, TierKind::kDram);
  EXPECT_EQ(Ask(1).tier, TierKind::kSsd);
}

TEST_F(TierPoliciesTest, TheDiskStoresObjectsUsedTwice) {
  Make({.hbm = 0, .dram = 8, .ssd = 64, .admission = AdmissionMode::kSecondUse});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
  EXPECT_EQ(Land(2), TierKind::kDram);
  EXPECT_EQ(Used(*rig_->ssd), 3u);
}

TEST_F(TierPoliciesTest, AFullDiskEvictsForMoreUsedObjects) {
  Make({.hbm = 0, .dram = 8, .ssd = 6, .admission = AdmissionMode::kTinyLfu});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  EXPECT_EQ(Used(*rig_->ssd), 6u);
  PublishAndSettle(3);
  Restart();
  EXPECT_EQ(Ask(3).reason, MissReason::kNeverSeen) << "used as often as the oldest";
  PublishAndSettle(3);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Land(3), TierKind::kDram);
  rig_->cache->Tick();
  rig_->Settle();
  Restart();
  EXPECT_EQ(Land(3), TierKind::kSsd);
  EXPECT_EQ(Used(*rig_->ssd), 6u);
}

TEST_F(TierPoliciesTest, WritesObjectsThatDisplaceOthers) {
  Make({.hbm = 0, .dram = 8, .ssd = 3});
  PublishAndSettle(1);
  ASSERT_TRUE(rig_->Publish(kSession, Plan(2), 2));  // in place of 1, which takes a moment to become free
  rig_->cache->Tick();
  rig_->Settle();
  EXPECT_THAT(rig_->cache->upkeep().inventory().Where(1, Plan(2).key), ElementsAre(TierKind::kDram, TierKind::kSsd));
}

TEST_F(TierPoliciesTest, FloorsProtectPools) {
  Make({.hbm = 0, .dram = 12, .ssd = 64, .admission = AdmissionMode::kSecondUse});
  rig_->cache->SetFloor(0, {1, PoolKind::kPublic}, 6 * kExtentBytes);
  rig_->cache->SetFloor(0, {1, PoolKind::kPrivate}, 3 * kExtentBytes);
  for (uint64_t text = 1; text <= 3; ++text) PublishAndSettle(text);
  EXPECT_EQ(Used(*rig_->dram), 9u) << "the private pool's floor stays free";
  PublishAndSettle(4);
  EXPECT_EQ(Ask(1).reason, MissReason::kEvicted);
  for (uint64_t text = 10; text < 30; ++text) {  // many private texts
    const Cache::Reservation reserved = rig_->cache->Reserve(kSession, Plan(text), {}, PoolKind::kPrivate);
    ASSERT_EQ(reserved.outcome, ReserveOutcome::kGranted);
    rig_->cache->Publish(kSession, reserved.id, TestSource(Plan(text), text), [](PublishOutcome) {});
    rig_->Settle();
  }
  EXPECT_EQ(Ask(4).reason, MissReason::kNone);
  EXPECT_EQ(Ask(3).reason, MissReason::kNone);
  EXPECT_EQ(Ask(2).reason, MissReason::kEvicted) << "above the floor bytes compete";
  EXPECT_EQ(Ask(29).reason, MissReason::kNone);
  EXPECT_EQ(Ask(28).reason, MissReason::kNone);
  EXPECT_EQ(Ask(27).reason, MissReason::kEvicted);
  const PoolShares pools = rig_->cache->stats().pools;
  const PoolShare& open = pools.at({TierKind::kDram, {1, PoolKind::kPublic}});
  const PoolShare& own = pools.at({TierKind::kDram, {1, PoolKind::kPrivate}});
  EXPECT_EQ(open.floor_bytes, 6 * kExtentBytes);
  EXPECT_EQ(own.floor_bytes, 3 * kExtentBytes);
  EXPECT_EQ(open.used_bytes, 6 * kExtentBytes);
  EXPECT_EQ((open.used_bytes + own.used_bytes) / kExtentBytes, Used(*rig_->dram));
}

TEST_F(TierPoliciesTest, APinnedObjectStaysInSomeTier) {
  Make({.hbm = 0, .dram = 6, .ssd = 6});
  PublishAndSettle(1);
  ASSERT_TRUE(rig_->cache->retention().Pin(1, Plan(1).key, rig_->clock.Now() + 1000));
  for (uint64_t text = 2; text < 9; ++text) PublishAndSettle(text);
  EXPECT_NE(Land(1), TierKind::kNone);
  rig_->clock.Advance(1000);
  rig_->cache->Tick();
  for (uint64_t text = 10; text < 16; ++text) PublishAndSettle(text);
  EXPECT_EQ(Land(1), TierKind::kNone);
  EXPECT_FALSE(rig_->cache->retention().Pin(1, Plan(1).key, 0));
  EXPECT_FALSE(rig_->cache->retention().Unpin(1, Plan(1).key));
}

TEST_F(TierPoliciesTest, UnusedObjectsExpire) {
  Make({});
  rig_->cache->retention().SetTimeToLive(1, 1000);
  for (const uint64_t text : {1, 2, 3}) PublishAndSettle(text);
  rig_->clock.Advance(900);
  EXPECT_EQ(Ask(2).reason, MissReason::kNone);
  const Match held = rig_->Lookup(kSession, Plan(3));
  rig_->clock.Advance(100);
  EXPECT_EQ(Ask(1).reason, MissReason::kExpired);
  rig_->cache->Tick();
  rig_->Settle();
  EXPECT_EQ(Ask(2).reason, MissReason::kNone);
  rig_->clock.Advance(2000);
  rig_->cache->Tick();
  rig_->Settle();
  EXPECT_EQ(Ask(2).reason, MissReason::kExpired);
  EXPECT_EQ(Used(*rig_->ssd), 3u) << "leased data stays";
  rig_->cache->Release(kSession, held.lease);
  Restart();
  EXPECT_THAT(rig_->observer.evicted, SizeIs(2));
}

TEST_F(TierPoliciesTest, AnOperatorEvictsFromEveryTier) {
  Make({});
  PublishAndSettle(1);
  const Match held = rig_->Lookup(kSession, Plan(1));
  EXPECT_TRUE(rig_->cache->retention().Evict(1, Plan(1).key));
  rig_->Settle();
  EXPECT_EQ(Ask(1).reason, MissReason::kEvicted);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
  EXPECT_EQ(Used(*rig_->hbm), 3u) << "leased bytes go with the lease";
  rig_->cache->Release(kSession, held.lease);
  EXPECT_EQ(Used(*rig_->hbm), 0u);
  EXPECT_FALSE(rig_->cache->retention().Evict(1, Plan(1).key));
}

}  // namespace
}  // namespace ashlar::storage
