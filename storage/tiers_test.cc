// Objects move between tiers: written behind, given up above, found below, copied up again, and never wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "storage/testing/tiered_rig.h"

namespace ashlar::storage {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
constexpr SessionId kAnn = 1, kBob = 2;
constexpr uint64_t kExtent = limits::kExtentBytes;

class TiersTest : public ::testing::Test {
 protected:
  void Make(const TieredOptions& options) {
    rig_ = std::make_unique<TieredRig>(options);
    rig_->cache->OpenSession(kAnn, 1);
  }
  ~TiersTest() override {
    if (rig_ == nullptr) return;
    rig_->cache->CloseSession(kAnn, [] {});
    rig_->Settle();
  }

  void Restart() {
    rig_->Restart();
    rig_->cache->OpenSession(kAnn, 1);
  }

  // 3 extents each.
  static ObjectHeader Plan(uint64_t text) { return TestPlan(text, 64); }
  void PublishAndSettle(uint64_t text) {
    ASSERT_TRUE(rig_->Publish(kAnn, Plan(text), text));
    rig_->Settle();
  }
  Found Ask(uint64_t text) {
    const Match match = rig_->Lookup(kAnn, Plan(text));
    rig_->cache->Release(kAnn, match.lease);
    return match.found[0];
  }
  // Looks up, lands and checks every byte; says where it was found, or kNone for a miss, whose reason is `reason_`.
  TierKind Land(uint64_t text) {
    const Match match = rig_->Lookup(kAnn, Plan(text));
    reason_ = match.found[0].reason;
    if (reason_ != MissReason::kNone) return TierKind::kNone;
    const TestPages pages(16);
    const auto landing = rig_->StartLanding(kAnn, ++landings_, match.lease, TestTarget(pages, {{0, 100}}));
    rig_->Settle();
    reason_ = landing->verdict.value()[0];
    if (reason_ == MissReason::kNone) {
      EXPECT_LT(LandingError(pages, Plan(text), text, 100), 1e-5);
      const MemoryTier& top = rig_->hbm != nullptr ? *rig_->hbm : *rig_->dram;
      EXPECT_EQ(TupleError(top, *match.found[0].slot, *match.found[0].header, text), 0.0);
    }
    rig_->cache->Release(kAnn, match.lease);
    return reason_ == MissReason::kNone ? match.found[0].tier : TierKind::kNone;
  }
  uint64_t Used(const Tier& tier) { return tier.Usage(1).used_bytes / kExtent; }

  std::unique_ptr<TieredRig> rig_;
  MissReason reason_ = MissReason::kNone;
  LandingId landings_ = 0;
};

TEST_F(TiersTest, WhatIsPublishedIsWrittenToEveryTierBelow) {
  Make({});
  PublishAndSettle(1);
  EXPECT_EQ(Used(*rig_->hbm), 3u);
  EXPECT_EQ(Used(*rig_->dram), 3u);
  EXPECT_EQ(Used(*rig_->ssd), 3u);
  EXPECT_THAT(rig_->observer.copied,
              ElementsAre(std::pair(TierKind::kHbm, TierKind::kDram), std::pair(TierKind::kDram, TierKind::kSsd)));
  EXPECT_EQ(rig_->cache->stats().objects, 1u);
  EXPECT_EQ(rig_->cache->stats().copies_under_way, 0u);
}

TEST_F(TiersTest, WhatIsGivenUpAboveIsFoundBelowAndComesUpWhole) {
  Make({.hbm = 4, .dram = 8, .ssd = 64});
  for (uint64_t text = 1; text <= 6; ++text) PublishAndSettle(text);
  EXPECT_THAT(rig_->observer.evicted, IsEmpty());
  EXPECT_EQ(Land(6), TierKind::kHbm);
  EXPECT_EQ(Land(5), TierKind::kDram);
  EXPECT_EQ(Land(1), TierKind::kSsd);
  EXPECT_EQ(Land(1), TierKind::kHbm);
  EXPECT_EQ(Land(2), TierKind::kSsd);
  EXPECT_EQ(Land(1), TierKind::kDram) << "it came by there";
  EXPECT_EQ(Used(*rig_->ssd), 18u) << "promotion copies, never moves";
  EXPECT_LE(Used(*rig_->hbm), 4u);
  EXPECT_LE(Used(*rig_->dram), 8u);
}

TEST_F(TiersTest, ARestartFindsWhatWasAcknowledged) {
  Make({.hbm = 4, .dram = 8, .ssd = 64});
  for (uint64_t text = 1; text <= 4; ++text) PublishAndSettle(text);
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(5), 5));  // and nothing of it is written
  rig_->disk.Crash();
  Restart();
  for (uint64_t text = 1; text <= 4; ++text) EXPECT_EQ(Land(text), TierKind::kSsd);
  EXPECT_EQ(Land(5), TierKind::kNone);
  EXPECT_EQ(reason_, MissReason::kNeverSeen);
}

TEST_F(TiersTest, PoolsSurviveARestart) {
  Make({.hbm = 0, .dram = 4, .ssd = 9});
  const Cache::Reservation room = rig_->cache->Reserve(kAnn, Plan(1), {}, PoolKind::kPrivate);
  rig_->cache->Publish(kAnn, room.id, TestSource(Plan(1), 1), [](PublishOutcome) {});
  rig_->Settle();
  for (const uint64_t text : {2, 3}) PublishAndSettle(text);
  ASSERT_EQ(Used(*rig_->ssd), 9u);
  Restart();
  rig_->cache->SetFloor(1, {1, PoolKind::kPrivate}, 3 * kExtent);
  for (const uint64_t text : {4, 5}) PublishAndSettle(text);
  EXPECT_EQ(Ask(2).reason, MissReason::kEvicted);
  EXPECT_EQ(Land(1), TierKind::kSsd) << "the oldest, and on its pool's floor";
}

TEST_F(TiersTest, ALandingStartsBeforeTheLastByteIsThere) {
  Make({.hbm = 0, .dram = 64, .ssd = 128});
  const ObjectHeader plan = TestPlan(1, 4000);
  ASSERT_GT(plan.Extents(), 16u);
  ASSERT_TRUE(rig_->Publish(kAnn, plan, 1));
  rig_->Settle();
  Restart();
  const Match match = rig_->Lookup(kAnn, plan);
  ASSERT_EQ(match.found[0].tier, TierKind::kSsd);
  const TestPages pages(260);
  const auto landing = rig_->StartLanding(kAnn, 1, match.lease, TestTarget(pages, {{0, 7}}));
  EXPECT_EQ(rig_->executor.pending(), 0u) << "nothing can land yet";
  while (landing->layers == 0 && rig_->io.pending() > 0) {
    rig_->io.Complete(0);
    rig_->executor.CompleteAll();
  }
  EXPECT_EQ(landing->layers, 1u);
  EXPECT_GT(rig_->io.pending(), 0u);
  EXPECT_FALSE(landing->verdict);
  rig_->Settle();
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kNone));
  EXPECT_LT(LandingError(pages, plan, 1, 7), 1e-4);
}

TEST_F(TiersTest, ReadsThatEndInAnyOrderLandTheSameBytes) {
  Make({.hbm = 0, .dram = 64, .ssd = 128});
  const ObjectHeader plan = TestPlan(1, 4000);
  ASSERT_TRUE(rig_->Publish(kAnn, plan, 1));
  rig_->Settle();
  Restart();
  const Match match = rig_->Lookup(kAnn, plan);
  const TestPages pages(260);
  const auto landing = rig_->StartLanding(kAnn, 1, match.lease, TestTarget(pages, {{0, 7}}));
  while (rig_->io.pending() > 0) rig_->io.Complete(rig_->io.pending() - 1);
  rig_->Settle();
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kNone));
  EXPECT_LT(LandingError(pages, plan, 1, 7), 1e-4);
}

TEST_F(TiersTest, AnUnreadableCopyIsAMissAndIsGone) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  rig_->disk.set_faults({.read_error = 1});
  EXPECT_EQ(Land(1), TierKind::kNone);
  EXPECT_EQ(reason_, MissReason::kTierError);
  EXPECT_THAT(rig_->observer.tier_errors, ElementsAre(TierKind::kSsd));
  rig_->disk.set_faults({});
  EXPECT_EQ(Land(1), TierKind::kNone);
  EXPECT_EQ(reason_, MissReason::kTierError) << "remembered";
  PublishAndSettle(1);
  EXPECT_EQ(Land(1), TierKind::kDram);
}

TEST_F(TiersTest, AFlippedBitIsAMissAndTheCopyIsGone) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  rig_->disk.set_faults({.bit_flip = 1});
  EXPECT_EQ(Land(1), TierKind::kNone);
  EXPECT_EQ(reason_, MissReason::kChecksumFailed);
  EXPECT_EQ(Used(*rig_->ssd), 3u);
}

TEST_F(TiersTest, AFullOrBrokenDiskCostsNothingButItself) {
  Make({.hbm = 0, .dram = 8, .ssd = 64});
  rig_->disk.set_faults({.write_error = 1});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  EXPECT_EQ(Land(1), TierKind::kDram);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
  EXPECT_THAT(rig_->observer.tier_errors, Contains(TierKind::kSsd));
  rig_->disk.set_faults({});
  EXPECT_EQ(Land(1), TierKind::kDram);  // a use is an occasion to try again
  EXPECT_EQ(Used(*rig_->ssd), 3u);
}

TEST_F(TiersTest, AnAllocationNeverWaitsForADiskThatWrites) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(1), 1));
  ASSERT_GT(rig_->io.pending(), 0u) << "it is being written";
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(2), 2)) << "in its place";
  rig_->Settle();
  EXPECT_EQ(Land(1), TierKind::kNone);
  EXPECT_EQ(reason_, MissReason::kEvicted);
  EXPECT_EQ(Land(2), TierKind::kDram);
  EXPECT_EQ(Used(*rig_->ssd), 3u) << "nothing half written is left";
}

TEST_F(TiersTest, WhatIsBeingGivenUpForOneObjectIsNotGivenUpForTheNext) {
  Make({.hbm = 18, .dram = 12, .ssd = 9});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  rig_->disk.set_faults({.write_error = 1});
  PublishAndSettle(3);
  rig_->disk.set_faults({});
  // The disk is busy with another tenant's object: it has room for 4, and does not begin.
  rig_->io.set_capacity(1);
  rig_->cache->OpenSession(kBob, 2);
  ASSERT_TRUE(rig_->Publish(kBob, TestPlan(9, 64, ObjectKind::kSegment, 2), 9));
  rig_->executor.CompleteAll();
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(4), 4));
  rig_->executor.CompleteAll();
  EXPECT_EQ(Used(*rig_->dram), 12u);
  EXPECT_EQ(Used(*rig_->ssd), 9u);
  // Then 3 waits for the room that 1 has on the disk, and 5 and 6 wait behind it, for 4's room in dram.
  for (const uint64_t text : {1, 2, 3}) EXPECT_EQ(Ask(text).reason, MissReason::kNone);
  for (const uint64_t text : {5, 6}) ASSERT_TRUE(rig_->Publish(kAnn, Plan(text), text));
  EXPECT_THAT(rig_->cache->Where(1, Plan(1).key), ElementsAre(TierKind::kHbm, TierKind::kDram));
  EXPECT_THAT(rig_->cache->Where(1, Plan(4).key), ElementsAre(TierKind::kHbm, TierKind::kDram));
  rig_->Settle();
  EXPECT_EQ(Used(*rig_->dram), 12u);
  for (uint64_t text = 1; text <= 6; ++text) EXPECT_EQ(Land(text), TierKind::kHbm);
  rig_->cache->CloseSession(kBob, [] {});
}

TEST_F(TiersTest, WhatTheDiskIsAcknowledgingMayGoAbove) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(1), 1));
  rig_->io.Complete(0);  // the data
  ASSERT_GT(rig_->io.pending(), 0u) << "the commit";
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(2), 2));
  EXPECT_EQ(Land(1), TierKind::kSsd) << "what is written can be read";
}

TEST_F(TiersTest, WhatTheDiskDoesNotAcknowledgeIsAMissThoughItWasOnItsWayUp) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(1), 1));
  rig_->io.Complete(0);
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(2), 2));
  const Match match = rig_->Lookup(kAnn, Plan(1));
  ASSERT_EQ(match.found[0].tier, TierKind::kSsd);
  rig_->disk.set_faults({.sync_error = 1});
  rig_->Settle();
  EXPECT_EQ(Ask(1).reason, MissReason::kTierError);
  rig_->cache->Release(kAnn, match.lease);
  EXPECT_EQ(Used(*rig_->dram), 0u);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
}

TEST_F(TiersTest, WhatIsGivenUpBeforeItsCopyDownHasBegunIsGivenUpOnce) {
  Make({.hbm = 32, .dram = 7, .ssd = 6});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  for (const uint64_t text : {3, 4, 5, 6}) {
    ASSERT_TRUE(rig_->Publish(kAnn, Plan(text), text));
    if (text == 3) rig_->executor.CompleteAll();
  }
  ASSERT_EQ(rig_->executor.pending(), 0u) << "all wait behind the third, and that for a deletion on the disk";
  ASSERT_EQ(Used(*rig_->dram), 6u);
  rig_->Settle();  // the third goes to the disk, the others to dram, one of them in its place
  EXPECT_EQ(Used(*rig_->dram), 6u);
  EXPECT_LE(Used(*rig_->ssd), 6u);
  for (uint64_t text = 1; text <= 6; ++text) EXPECT_EQ(Land(text), TierKind::kHbm);
}

TEST_F(TiersTest, WhatNobodyWaitsForDoesNotComeUp) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  const Match match = rig_->Lookup(kAnn, Plan(1));
  ASSERT_EQ(match.found[0].tier, TierKind::kSsd);
  rig_->cache->Release(kAnn, match.lease);
  rig_->Settle();
  EXPECT_EQ(Used(*rig_->dram), 0u);
  EXPECT_EQ(Land(1), TierKind::kSsd);
}

TEST_F(TiersTest, WhatIsAskedForAgainWhileItsLastWayUpDrainsComesUp) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  rig_->cache->Release(kAnn, rig_->Lookup(kAnn, Plan(1)).lease);
  ASSERT_GT(rig_->io.pending(), 0u) << "something is still read into its place";
  EXPECT_EQ(Land(1), TierKind::kSsd);
  EXPECT_EQ(Land(1), TierKind::kDram);
}

TEST_F(TiersTest, WhatIsAskedForAgainAndGivenUpAgainLeavesNothing) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  for (int i = 0; i < 2; ++i) {
    const Match match = rig_->Lookup(kAnn, Plan(1));
    EXPECT_EQ(match.found[0].tier, TierKind::kSsd);
    rig_->cache->Release(kAnn, match.lease);
  }
  rig_->Settle();
  EXPECT_EQ(Used(*rig_->dram), 0u);
  EXPECT_EQ(rig_->cache->stats().copies_under_way, 0u);
}

// Whatever part of both ways up is still under way: from the disk to memory, and from there to the top.
TEST_F(TiersTest, WhatIsAskedForAgainAnywhereOnItsWayThroughThreeTiersComesUp) {
  constexpr int kSteps = 12;  // more than the way up takes
  int drained = 0;
  for (int steps = 0; steps < kSteps; ++steps) {
    SCOPED_TRACE(steps);
    Make({.hbm = 32, .dram = 32, .ssd = 64});
    const ObjectHeader plan = TestPlan(1, 4000);
    ASSERT_TRUE(rig_->Publish(kAnn, plan, 1));
    rig_->Settle();
    Restart();
    Match match = rig_->Lookup(kAnn, plan);
    ASSERT_EQ(match.found[0].tier, TierKind::kSsd);
    for (int i = 0; i < steps; ++i) {
      ManualExecutor& next = rig_->executor.pending() > 0 && i % 2 == 1 ? rig_->executor : rig_->io;
      if (next.pending() > 0) next.Complete(0);
    }
    rig_->cache->Release(kAnn, match.lease);
    drained += rig_->io.pending() + rig_->executor.pending() > 0 ? 1 : 0;
    match = rig_->Lookup(kAnn, plan);
    ASSERT_EQ(match.found[0].reason, MissReason::kNone);
    const TestPages pages(260);
    const auto landing = rig_->StartLanding(kAnn, 1, match.lease, TestTarget(pages, {{0, 7}}));
    rig_->Settle();
    ASSERT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
    EXPECT_LT(LandingError(pages, plan, 1, 7), 1e-4);
    rig_->cache->Release(kAnn, match.lease);
  }
  EXPECT_GT(drained, kSteps / 2);
}

TEST_F(TiersTest, WhatIsAskedForAgainKeepsItsLastCopyUntilItsLastWayUpHasDrained) {
  const ObjectHeader plan = TestPlan(1, 4000);
  Make({.hbm = 32, .dram = 32, .ssd = plan.Extents() + 1});
  ASSERT_TRUE(rig_->Publish(kAnn, plan, 1));
  rig_->Settle();
  Restart();
  const LeaseId given_up = rig_->Lookup(kAnn, plan).lease;
  while (rig_->io.pending() > 1) rig_->io.Complete(0);
  rig_->cache->Release(kAnn, given_up);
  rig_->io.Complete(0);
  ASSERT_GT(rig_->executor.pending(), 0u) << "the top still drains, and nothing reads the disk any more";
  const Match match = rig_->Lookup(kAnn, plan);
  ASSERT_EQ(match.found[0].reason, MissReason::kNone);
  const Cache::Reservation room = rig_->cache->Reserve(kAnn, Plan(2));
  ASSERT_EQ(room.outcome, ReserveOutcome::kGranted);
  rig_->cache->Publish(kAnn, room.id, TestSource(Plan(2), 2), [](PublishOutcome) {});
  rig_->executor.Complete(rig_->executor.pending() - 1);  // published
  rig_->executor.Complete(rig_->executor.pending() - 1);  // copied down, and next the disk should have it
  EXPECT_EQ(Used(*rig_->ssd), plan.Extents());
  const TestPages pages(260);
  const auto landing = rig_->StartLanding(kAnn, 1, match.lease, TestTarget(pages, {{0, 7}}));
  rig_->Settle();
  EXPECT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
  EXPECT_LT(LandingError(pages, plan, 1, 7), 1e-4);
}

TEST_F(TiersTest, ALandingThatWaitsForADiskEndsAtOnceWhenItIsNotWantedAnyMore) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  const Match match = rig_->Lookup(kAnn, Plan(1));
  const TestPages pages(16);
  const auto landing = rig_->StartLanding(kAnn, 9, match.lease, TestTarget(pages, {{0, 0}}));
  bool quiet = false;
  rig_->cache->Quiesce(kAnn, 9, [&] { quiet = true; });
  EXPECT_TRUE(quiet);
  EXPECT_THAT(landing->verdict.value(), ElementsAre(MissReason::kCancelled));
  bool drained = false;
  rig_->cache->CloseSession(kAnn, [&] { drained = true; });
  EXPECT_TRUE(drained);
}

TEST_F(TiersTest, ALeaseThatNeedsTheRoomRefusesPromotions) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  const Match match = rig_->Lookup(kAnn, Plan(2));
  EXPECT_EQ(Ask(1).reason, MissReason::kBudgetRefused);
  rig_->cache->Release(kAnn, match.lease);
  EXPECT_EQ(Land(1), TierKind::kSsd);
}

TEST_F(TiersTest, AHitThatDoesNotPayIsDeclined) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2, 3}) PublishAndSettle(text);
  const ObjectHeader plan = Plan(1);
  Query query{.kind = plan.kind, .key = plan.key, .tokens = plan.tokens, .recompute = 1000};
  Match match = rig_->cache->Lookup(kAnn, {&query, 1});
  EXPECT_EQ(match.found[0].reason, MissReason::kNone) << "nobody knows yet what it takes";
  rig_->clock.Advance(2000);
  rig_->Settle();
  rig_->cache->Release(kAnn, match.lease);
  PublishAndSettle(4);  // in its place
  EXPECT_EQ(rig_->cache->Lookup(kAnn, {&query, 1}).found[0].reason, MissReason::kTooDear);
  query.recompute = 2000;
  match = rig_->cache->Lookup(kAnn, {&query, 1});
  EXPECT_EQ(match.found[0].tier, TierKind::kSsd);
  rig_->Settle();
  rig_->cache->Release(kAnn, match.lease);
  query.recompute = 1;
  match = rig_->cache->Lookup(kAnn, {&query, 1});
  EXPECT_EQ(match.found[0].tier, TierKind::kDram) << "what is there costs nothing to bring up";
  rig_->cache->Release(kAnn, match.lease);
}

// What a landing waits for its bytes to come up is the copy's time, not its own.
TEST_F(TiersTest, ACopyAndALandingAreMeasuredOnceEach) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  const ObjectHeader plan = Plan(1);
  Query query{.kind = plan.kind, .key = plan.key, .tokens = plan.tokens};
  Match match = rig_->cache->Lookup(kAnn, {&query, 1});
  const TestPages pages(16);
  const auto landing = rig_->StartLanding(kAnn, 77, match.lease, TestTarget(pages, {{0, 100}}));
  rig_->clock.Advance(5000);
  rig_->io.CompleteAll();
  rig_->clock.Advance(2000);
  rig_->Settle();
  ASSERT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
  rig_->cache->Release(kAnn, match.lease);
  const auto ask = [&](Nanos recompute) {
    query.recompute = recompute;
    const Match asked = rig_->cache->Lookup(kAnn, {&query, 1});
    rig_->cache->Release(kAnn, asked.lease);
    return asked.found[0].reason;
  };
  EXPECT_EQ(ask(2001), MissReason::kNone) << "it is at the top";
  EXPECT_EQ(ask(1999), MissReason::kTooDear);
  EXPECT_EQ(rig_->cache->LastMisses(1, 1)[0].why.present->tier, TierKind::kDram);
  PublishAndSettle(3);  // in its place
  EXPECT_EQ(ask(6999), MissReason::kTooDear);
  EXPECT_EQ(ask(7001), MissReason::kNone);
}

TEST_F(TiersTest, TheDiskTakesWhatIsUsedTwice) {
  Make({.hbm = 0, .dram = 8, .ssd = 64, .admission = AdmissionMode::kSecondUse});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
  EXPECT_EQ(Land(2), TierKind::kDram);
  EXPECT_EQ(Used(*rig_->ssd), 3u);
}

TEST_F(TiersTest, AFullDiskMakesRoomForWhatIsUsedMore) {
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

TEST_F(TiersTest, WhatTheDiskMakesRoomForIsWritten) {
  Make({.hbm = 0, .dram = 8, .ssd = 3});
  PublishAndSettle(1);
  ASSERT_TRUE(rig_->Publish(kAnn, Plan(2), 2));  // in the place of 1, which takes a moment to become free
  rig_->cache->Tick();
  rig_->Settle();
  EXPECT_THAT(rig_->cache->Where(1, Plan(2).key), ElementsAre(TierKind::kDram, TierKind::kSsd));
}

TEST_F(TiersTest, FloorsKeepPoolsApart) {
  Make({.hbm = 0, .dram = 12, .ssd = 64, .admission = AdmissionMode::kSecondUse});
  rig_->cache->SetFloor(0, {1, PoolKind::kPublic}, 6 * kExtent);
  rig_->cache->SetFloor(0, {1, PoolKind::kPrivate}, 3 * kExtent);
  for (uint64_t text = 1; text <= 3; ++text) PublishAndSettle(text);
  EXPECT_EQ(Used(*rig_->dram), 9u) << "the private pool's floor stays free";
  PublishAndSettle(4);
  EXPECT_EQ(Ask(1).reason, MissReason::kEvicted);
  for (uint64_t text = 10; text < 30; ++text) {  // private churn
    const Cache::Reservation room = rig_->cache->Reserve(kAnn, Plan(text), {}, PoolKind::kPrivate);
    ASSERT_EQ(room.outcome, ReserveOutcome::kGranted);
    rig_->cache->Publish(kAnn, room.id, TestSource(Plan(text), text), [](PublishOutcome) {});
    rig_->Settle();
  }
  EXPECT_EQ(Ask(4).reason, MissReason::kNone);
  EXPECT_EQ(Ask(3).reason, MissReason::kNone);
  EXPECT_EQ(Ask(2).reason, MissReason::kEvicted) << "above the floor bytes compete";
  EXPECT_EQ(Ask(29).reason, MissReason::kNone);
  EXPECT_EQ(Ask(28).reason, MissReason::kNone);
  EXPECT_EQ(Ask(27).reason, MissReason::kEvicted);
}

TEST_F(TiersTest, APinnedObjectStaysInSomeTier) {
  Make({.hbm = 0, .dram = 6, .ssd = 6});
  PublishAndSettle(1);
  ASSERT_TRUE(rig_->cache->Pin(1, Plan(1).key, rig_->clock.Now() + 1000));
  for (uint64_t text = 2; text < 9; ++text) PublishAndSettle(text);
  EXPECT_NE(Land(1), TierKind::kNone);
  rig_->clock.Advance(1000);
  rig_->cache->Tick();
  for (uint64_t text = 10; text < 16; ++text) PublishAndSettle(text);
  EXPECT_EQ(Land(1), TierKind::kNone);
  EXPECT_FALSE(rig_->cache->Pin(1, Plan(1).key, 0));
  EXPECT_FALSE(rig_->cache->Unpin(1, Plan(1).key));
}

TEST_F(TiersTest, WhatIsNotUsedExpires) {
  Make({});
  rig_->cache->SetTimeToLive(1, 1000);
  for (const uint64_t text : {1, 2, 3}) PublishAndSettle(text);
  rig_->clock.Advance(900);
  EXPECT_EQ(Ask(2).reason, MissReason::kNone);
  const Match held = rig_->Lookup(kAnn, Plan(3));
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
  rig_->cache->Release(kAnn, held.lease);
  Restart();
  EXPECT_THAT(rig_->observer.evicted, SizeIs(2));
}

TEST_F(TiersTest, AnOperatorEvictsFromEveryTier) {
  Make({});
  PublishAndSettle(1);
  const Match held = rig_->Lookup(kAnn, Plan(1));
  EXPECT_TRUE(rig_->cache->Evict(1, Plan(1).key));
  rig_->Settle();
  EXPECT_EQ(Ask(1).reason, MissReason::kEvicted);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
  EXPECT_EQ(Used(*rig_->hbm), 3u) << "leased bytes go with the lease";
  rig_->cache->Release(kAnn, held.lease);
  EXPECT_EQ(Used(*rig_->hbm), 0u);
  EXPECT_FALSE(rig_->cache->Evict(1, Plan(1).key));
}

}  // namespace
}  // namespace ashlar::storage
