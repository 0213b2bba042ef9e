// SPDX-License-Identifier: Apache-2.0
// Objects move between tiers: copied down, evicted above, found below, promoted again, and never corrupt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <vector>

#include "storage/testing/tenants.h"
#include "storage/testing/tiers_fixture.h"

namespace ashlar::storage {
namespace {

using limits::kExtentBytes;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST_F(TiersTest, PublishedObjectIsWrittenToLowerTiers) {
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

TEST_F(TiersTest, DemotedObjectIsPromotedComplete) {
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

TEST_F(TiersTest, ARestartFindsAcknowledgedObjects) {
  Make({.hbm = 4, .dram = 8, .ssd = 64});
  for (uint64_t text = 1; text <= 4; ++text) PublishAndSettle(text);
  ASSERT_TRUE(rig_->Publish(kSession, Plan(5), 5));  // and no part of it is written
  rig_->disk.Crash();
  Restart();
  for (uint64_t text = 1; text <= 4; ++text) EXPECT_EQ(Land(text), TierKind::kSsd);
  EXPECT_EQ(Land(5), TierKind::kNone);
  EXPECT_EQ(reason_, MissReason::kNeverSeen);
}

TEST_F(TiersTest, PoolsSurviveARestart) {
  Make({.hbm = 0, .dram = 4, .ssd = 9});
  const Cache::Reservation reserved = rig_->cache->Reserve(kSession, Plan(1), {}, PoolKind::kPrivate);
  rig_->cache->Publish(kSession, reserved.id, TestSource(Plan(1), 1), [](PublishOutcome) {});
  rig_->Settle();
  for (const uint64_t text : {2, 3}) PublishAndSettle(text);
  ASSERT_EQ(Used(*rig_->ssd), 9u);
  Restart();
  rig_->cache->SetFloor(1, {1, PoolKind::kPrivate}, 3 * kExtentBytes);
  for (const uint64_t text : {4, 5}) PublishAndSettle(text);
  EXPECT_EQ(Ask(2).reason, MissReason::kEvicted);
  EXPECT_EQ(Land(1), TierKind::kSsd) << "the oldest, and on its pool's floor";
}

// The executor's queue was full. The next tick may be a second away.
TEST_F(TiersTest, RefusedPromotionStartsWhenALandingEnds) {
  Make({.hbm = 8, .dram = 16, .ssd = 0});
  for (uint64_t text = 1; text <= 3; ++text) PublishAndSettle(text);
  const Match landed = rig_->Lookup(kSession, Plan(3));
  ASSERT_EQ(landed.found[0].tier, TierKind::kHbm);
  const TestPages pages(16);
  const auto landing = rig_->StartLanding(kSession, ++landings_, landed.lease, TestTarget(pages, {{0, 100}}));
  rig_->executor.set_capacity(1);
  const Match promoted = rig_->Lookup(kSession, Plan(1));
  ASSERT_EQ(promoted.found[0].tier, TierKind::kDram);
  ASSERT_EQ(rig_->cache->stats().copies_under_way, 1u);
  rig_->executor.CompleteAll();
  EXPECT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
  EXPECT_EQ(rig_->cache->stats().copies_under_way, 0u);
  for (const Match& match : {landed, promoted}) rig_->cache->Release(kSession, match.lease);
}

TEST_F(TiersTest, ALandingStartsBeforeTheLastByteArrives) {
  Make({.hbm = 0, .dram = 64, .ssd = 128});
  const ObjectHeader plan = TestPlan(1, 4000);
  ASSERT_GT(plan.Extents(), 16u);
  ASSERT_TRUE(rig_->Publish(kSession, plan, 1));
  rig_->Settle();
  Restart();
  const Match match = rig_->Lookup(kSession, plan);
  ASSERT_EQ(match.found[0].tier, TierKind::kSsd);
  const TestPages pages(260);
  const auto landing = rig_->StartLanding(kSession, 1, match.lease, TestTarget(pages, {{0, 7}}));
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
  ASSERT_TRUE(rig_->Publish(kSession, plan, 1));
  rig_->Settle();
  Restart();
  const Match match = rig_->Lookup(kSession, plan);
  const TestPages pages(260);
  const auto landing = rig_->StartLanding(kSession, 1, match.lease, TestTarget(pages, {{0, 7}}));
  while (rig_->io.pending() > 0) rig_->io.Complete(rig_->io.pending() - 1);
  rig_->Settle();
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kNone));
  EXPECT_LT(LandingError(pages, plan, 1, 7), 1e-4);
}

TEST_F(TiersTest, AnUnreadableCopyIsAMissAndIsDropped) {
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

TEST_F(TiersTest, AFlippedBitIsAMissAndTheCopyIsDropped) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  rig_->disk.set_faults({.bit_flip = 1});
  EXPECT_EQ(Land(1), TierKind::kNone);
  EXPECT_EQ(reason_, MissReason::kChecksumFailed);
  EXPECT_EQ(Used(*rig_->ssd), 3u);
}

TEST_F(TiersTest, AFullOrBrokenDiskAffectsOnlyItself) {
  Make({.hbm = 0, .dram = 8, .ssd = 64});
  rig_->disk.set_faults({.write_error = 1});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  EXPECT_EQ(Land(1), TierKind::kDram);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
  EXPECT_THAT(rig_->observer.tier_errors, Contains(TierKind::kSsd));
  EXPECT_EQ(rig_->ssd->health().status().message(), "simulated disk: write error");
  rig_->disk.set_faults({});
  rig_->LetDiskRecover();
  EXPECT_EQ(rig_->ssd->health().status(), absl::OkStatus());
  EXPECT_EQ(Land(1), TierKind::kDram);  // a use triggers another attempt
  EXPECT_EQ(Used(*rig_->ssd), 3u);
}

TEST_F(TiersTest, ADegradedDiskIsReadOnlyAndEvictsNothing) {
  Make({.hbm = 0, .dram = 4, .ssd = 6});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  rig_->disk.set_faults({.record_error = 1});
  PublishAndSettle(3);  // in dram, and on the disk in place of 1, which is evicted for it before the disk fails
  ASSERT_TRUE(rig_->ssd->health().degraded());
  const uint64_t writes = rig_->disk.counts().writes;
  for (const uint64_t text : {4, 5, 6}) PublishAndSettle(text);
  EXPECT_EQ(rig_->disk.counts().writes, writes) << "what is bound to fail is not tried";
  EXPECT_EQ(Land(2), TierKind::kSsd) << "what it has is served";
  for (int i = 0; i < 40; ++i) {
    rig_->clock.Advance(1'000'000'000);
    rig_->cache->Tick();
    rig_->Settle();
  }
  const uint64_t probes = rig_->disk.counts().writes - writes;
  EXPECT_GE(probes, 6u);
  EXPECT_LE(probes, 12u) << "at intervals that grow to five seconds";
  EXPECT_TRUE(rig_->ssd->health().degraded());
  rig_->disk.set_faults({});
  for (int i = 0; i < 6; ++i) rig_->LetDiskRecover();
  EXPECT_FALSE(rig_->ssd->health().degraded());
  EXPECT_LE(Used(*rig_->ssd), 3u) << "deletions that had to wait are made up for";
  PublishAndSettle(7);
  EXPECT_EQ(Used(*rig_->ssd), 6u);
}

TEST_F(TiersTest, AnAllocationNeverWaitsForADiskThatWrites) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  ASSERT_TRUE(rig_->Publish(kSession, Plan(1), 1));
  ASSERT_GT(rig_->io.pending(), 0u) << "it is being written";
  ASSERT_TRUE(rig_->Publish(kSession, Plan(2), 2)) << "in its place";
  rig_->Settle();
  EXPECT_EQ(Land(1), TierKind::kNone);
  EXPECT_EQ(reason_, MissReason::kEvicted);
  EXPECT_EQ(Land(2), TierKind::kDram);
  EXPECT_EQ(Used(*rig_->ssd), 3u) << "nothing half written is left";
}

TEST_F(TiersTest, EvictionInFlightIsNotCountedTwice) {
  Make({.hbm = 18, .dram = 12, .ssd = 9});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  rig_->disk.set_faults({.write_error = 1});
  PublishAndSettle(3);
  rig_->disk.set_faults({});
  rig_->LetDiskRecover();
  // The disk is busy with another tenant's object: it has space for 4, but does not begin.
  rig_->io.set_capacity(1);
  rig_->cache->OpenSession(kBob, 2);
  ASSERT_TRUE(rig_->Publish(kBob, TestPlan(9, 64, ObjectKind::kSegment, 2), 9));
  rig_->executor.CompleteAll();
  ASSERT_TRUE(rig_->Publish(kSession, Plan(4), 4));
  rig_->executor.CompleteAll();
  EXPECT_EQ(Used(*rig_->dram), 12u);
  EXPECT_EQ(Used(*rig_->ssd), 9u);
  // Then 3 waits for 1's space on the disk, and 5 and 6 wait after it for 4's space in dram.
  for (const uint64_t text : {1, 2, 3}) EXPECT_EQ(Ask(text).reason, MissReason::kNone);
  for (const uint64_t text : {5, 6}) ASSERT_TRUE(rig_->Publish(kSession, Plan(text), text));
  EXPECT_THAT(rig_->cache->upkeep().inventory().Where(1, Plan(1).key), ElementsAre(TierKind::kHbm, TierKind::kDram));
  EXPECT_THAT(rig_->cache->upkeep().inventory().Where(1, Plan(4).key), ElementsAre(TierKind::kHbm, TierKind::kDram));
  rig_->Settle();
  EXPECT_EQ(Used(*rig_->dram), 12u);
  for (uint64_t text = 1; text <= 6; ++text) EXPECT_EQ(Land(text), TierKind::kHbm);
  rig_->cache->CloseSession(kBob, [] {});
}

TEST_F(TiersTest, CopyMayBeEvictedDuringDiskAcknowledgement) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  ASSERT_TRUE(rig_->Publish(kSession, Plan(1), 1));
  rig_->io.Complete(0);  // the data
  ASSERT_GT(rig_->io.pending(), 0u) << "the commit";
  ASSERT_TRUE(rig_->Publish(kSession, Plan(2), 2));
  EXPECT_EQ(Land(1), TierKind::kSsd) << "what is written can be read";
}

TEST_F(TiersTest, UnacknowledgedDiskCopyIsMiss) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  ASSERT_TRUE(rig_->Publish(kSession, Plan(1), 1));
  rig_->io.Complete(0);
  ASSERT_TRUE(rig_->Publish(kSession, Plan(2), 2));
  const Match match = rig_->Lookup(kSession, Plan(1));
  ASSERT_EQ(match.found[0].tier, TierKind::kSsd);
  rig_->disk.set_faults({.sync_error = 1});
  rig_->Settle();
  EXPECT_EQ(Ask(1).reason, MissReason::kTierError);
  rig_->cache->Release(kSession, match.lease);
  EXPECT_EQ(Used(*rig_->dram), 0u);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
}

TEST_F(TiersTest, EvictionBeforeDemotionHappensOnce) {
  Make({.hbm = 32, .dram = 7, .ssd = 6});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  for (const uint64_t text : {3, 4, 5, 6}) {
    ASSERT_TRUE(rig_->Publish(kSession, Plan(text), text));
    if (text == 3) rig_->executor.CompleteAll();
  }
  ASSERT_EQ(rig_->executor.pending(), 0u) << "all wait behind the third, and that for a deletion on the disk";
  ASSERT_EQ(Used(*rig_->dram), 6u);
  rig_->Settle();  // the third goes to the disk, the others to dram, one of them in its place
  EXPECT_EQ(Used(*rig_->dram), 6u);
  EXPECT_LE(Used(*rig_->ssd), 6u);
  for (uint64_t text = 1; text <= 6; ++text) EXPECT_EQ(Land(text), TierKind::kHbm);
}

TEST_F(TiersTest, UnneededObjectIsNotPromoted) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  const Match match = rig_->Lookup(kSession, Plan(1));
  ASSERT_EQ(match.found[0].tier, TierKind::kSsd);
  rig_->cache->Release(kSession, match.lease);
  rig_->Settle();
  EXPECT_EQ(Used(*rig_->dram), 0u);
  EXPECT_EQ(Land(1), TierKind::kSsd);
}

TEST_F(TiersTest, RequestDuringDrainingPromotionPromotesAgain) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  rig_->cache->Release(kSession, rig_->Lookup(kSession, Plan(1)).lease);
  ASSERT_GT(rig_->io.pending(), 0u) << "something is still read into its place";
  EXPECT_EQ(Land(1), TierKind::kSsd);
  EXPECT_EQ(Land(1), TierKind::kDram);
}

TEST_F(TiersTest, RepeatedEvictionLeavesNothing) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  for (int i = 0; i < 2; ++i) {
    const Match match = rig_->Lookup(kSession, Plan(1));
    EXPECT_EQ(match.found[0].tier, TierKind::kSsd);
    rig_->cache->Release(kSession, match.lease);
  }
  rig_->Settle();
  EXPECT_EQ(Used(*rig_->dram), 0u);
  EXPECT_EQ(rig_->cache->stats().copies_under_way, 0u);
}

// Any part of both copies may be in flight: from the disk to memory, and from there to the top.
TEST_F(TiersTest, RequestDuringDemotionPromotesAgain) {
  constexpr int kSteps = 12;  // more steps than the promotion takes
  int drained = 0;
  for (int steps = 0; steps < kSteps; ++steps) {
    SCOPED_TRACE(steps);
    Make({.hbm = 32, .dram = 32, .ssd = 64});
    const ObjectHeader plan = TestPlan(1, 4000);
    ASSERT_TRUE(rig_->Publish(kSession, plan, 1));
    rig_->Settle();
    Restart();
    Match match = rig_->Lookup(kSession, plan);
    ASSERT_EQ(match.found[0].tier, TierKind::kSsd);
    for (int i = 0; i < steps; ++i) {
      ManualExecutor& next = rig_->executor.pending() > 0 && i % 2 == 1 ? rig_->executor : rig_->io;
      if (next.pending() > 0) next.Complete(0);
    }
    rig_->cache->Release(kSession, match.lease);
    drained += rig_->io.pending() + rig_->executor.pending() > 0 ? 1 : 0;
    match = rig_->Lookup(kSession, plan);
    ASSERT_EQ(match.found[0].reason, MissReason::kNone);
    const TestPages pages(260);
    const auto landing = rig_->StartLanding(kSession, 1, match.lease, TestTarget(pages, {{0, 7}}));
    rig_->Settle();
    ASSERT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
    EXPECT_LT(LandingError(pages, plan, 1, 7), 1e-4);
    rig_->cache->Release(kSession, match.lease);
  }
  EXPECT_GT(drained, kSteps / 2);
}

TEST_F(TiersTest, RequestedObjectKeepsLastCopyUntilPromotionDrains) {
  const ObjectHeader plan = TestPlan(1, 4000);
  Make({.hbm = 32, .dram = 32, .ssd = plan.Extents() + 1});
  ASSERT_TRUE(rig_->Publish(kSession, plan, 1));
  rig_->Settle();
  Restart();
  const LeaseId abandoned = rig_->Lookup(kSession, plan).lease;
  while (rig_->io.pending() > 1) rig_->io.Complete(0);
  rig_->cache->Release(kSession, abandoned);
  rig_->io.Complete(0);
  ASSERT_GT(rig_->executor.pending(), 0u) << "the top still drains, and nothing reads the disk any more";
  const Match match = rig_->Lookup(kSession, plan);
  ASSERT_EQ(match.found[0].reason, MissReason::kNone);
  const Cache::Reservation reserved = rig_->cache->Reserve(kSession, Plan(2));
  ASSERT_EQ(reserved.outcome, ReserveOutcome::kGranted);
  rig_->cache->Publish(kSession, reserved.id, TestSource(Plan(2), 2), [](PublishOutcome) {});
  rig_->executor.Complete(rig_->executor.pending() - 1);  // published
  rig_->executor.Complete(rig_->executor.pending() - 1);  // copied down; the copy to the disk is next
  EXPECT_EQ(Used(*rig_->ssd), plan.Extents());
  const TestPages pages(260);
  const auto landing = rig_->StartLanding(kSession, 1, match.lease, TestTarget(pages, {{0, 7}}));
  rig_->Settle();
  EXPECT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
  EXPECT_LT(LandingError(pages, plan, 1, 7), 1e-4);
}

// The copy in dram was cancelled, while the copy at the top still reads from its space. The space is not filled
// meanwhile.
TEST_F(TiersTest, BrokenCopyKeepsItsSpaceUntilItsLastReaderEnds) {
  const ObjectHeader plan = TestPlan(1, 4000);
  Make({.hbm = 32, .dram = 32, .ssd = 64});
  ASSERT_TRUE(rig_->Publish(kSession, plan, 1));
  rig_->Settle();
  Restart();
  const LeaseId cancelled = rig_->Lookup(kSession, plan).lease;
  while (rig_->io.pending() > 1) rig_->io.Complete(0);
  rig_->cache->Release(kSession, cancelled);
  rig_->io.Complete(0);
  ASSERT_GT(rig_->executor.pending(), 0u) << "the top still drains";
  ASSERT_EQ(Used(*rig_->dram), plan.Extents());
  constexpr SessionId kOfDram = kSession + 2;
  rig_->cache->OpenSession(kOfDram, 1);
  rig_->cache->SetLevel(kOfDram, 1);
  EXPECT_EQ(rig_->Lookup(kOfDram, plan).found[0].reason, MissReason::kBudgetRefused);
  rig_->Settle();
  EXPECT_EQ(Used(*rig_->dram), 0u);
  const Match match = rig_->Lookup(kOfDram, plan);
  EXPECT_EQ(match.found[0].reason, MissReason::kNone);
  rig_->Settle();
  EXPECT_EQ(Used(*rig_->dram), plan.Extents());
  rig_->cache->Release(kOfDram, match.lease);
  EXPECT_TRUE(rig_->cache->retention().Evict(1, plan.key));
  EXPECT_EQ(Used(*rig_->dram), 0u);
}

TEST_F(TiersTest, ACancelledLandingThatWaitsForADiskEndsAtOnce) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  const Match match = rig_->Lookup(kSession, Plan(1));
  const TestPages pages(16);
  const auto landing = rig_->StartLanding(kSession, 9, match.lease, TestTarget(pages, {{0, 0}}));
  bool quiesced = false;
  rig_->cache->Quiesce(kSession, 9, [&] { quiesced = true; });
  EXPECT_TRUE(quiesced);
  EXPECT_THAT(landing->verdict.value(), ElementsAre(MissReason::kCancelled));
  bool drained = false;
  rig_->cache->CloseSession(kSession, [&] { drained = true; });
  EXPECT_TRUE(drained);
}

TEST_F(TiersTest, ALeaseThatNeedsTheSpaceRefusesPromotions) {
  Make({.hbm = 0, .dram = 4, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  const Match match = rig_->Lookup(kSession, Plan(2));
  EXPECT_EQ(Ask(1).reason, MissReason::kBudgetRefused);
  rig_->cache->Release(kSession, match.lease);
  EXPECT_EQ(Land(1), TierKind::kSsd);
}

}  // namespace
}  // namespace ashlar::storage
