// SPDX-License-Identifier: Apache-2.0
// A disk whose operations do not return causes misses: no request waits for it, and no object on it is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "storage/testing/tiers_fixture.h"

namespace ashlar::storage {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

class StalledDiskTest : public TiersTest {
 protected:
  static constexpr uint64_t kOnDisk = 1, kInMemory = 2;

  // One text only on the disk, another one also in memory.
  void MakeBoth(const TieredOptions& options = {.hbm = 0, .dram = 16, .ssd = 64}) {
    Make(options);
    PublishAndSettle(kOnDisk);
    Restart();
    PublishAndSettle(kInMemory);
  }
  std::vector<TierKind> Where(uint64_t text) {
    return rig_->cache->upkeep().inventory().Where(1, Plan(text).key, Plan(text).shard);
  }
};

TEST_F(StalledDiskTest, ALandingThatWaitsForTheDiskIsAMiss) {
  MakeBoth();
  const Match match = rig_->Lookup(kSession, Plan(kOnDisk));
  ASSERT_EQ(match.found[0].tier, TierKind::kSsd);
  const TestPages pages(16);
  const auto landing = rig_->StartLanding(kSession, 100, match.lease, TestTarget(pages, {{0, 100}}));
  std::optional<bool> whole;
  ASSERT_TRUE(rig_->cache->WhenLoaded(kSession, match.lease, 0, 1, [&](bool w) { whole = w; }));
  rig_->executor.CompleteAll();
  EXPECT_FALSE(landing->verdict.has_value());
  rig_->StallDisk();
  EXPECT_THAT(landing->verdict, ::testing::Optional(ElementsAre(MissReason::kTierError)));
  EXPECT_EQ(whole, false);
  EXPECT_TRUE(rig_->ssd->health().degraded());
  EXPECT_EQ(rig_->ssd->health().status().message(), "the disk hangs; an operation has not returned for 3 s");
  rig_->cache->Release(kSession, match.lease);

  rig_->EndStall();
  EXPECT_FALSE(rig_->ssd->health().degraded());
  EXPECT_NE(Land(kOnDisk), TierKind::kNone) << "it is not lost";
}

TEST_F(StalledDiskTest, DiskOnlyObjectsAreMissedWhileStalled) {
  MakeBoth();
  rig_->StallDisk();
  EXPECT_EQ(Ask(kOnDisk).reason, MissReason::kTierError);
  EXPECT_EQ(Land(kInMemory), TierKind::kDram);
  EXPECT_EQ(rig_->io.pending(), 0u) << "nothing more is asked of it";
  rig_->EndStall();
  EXPECT_EQ(Land(kOnDisk), TierKind::kSsd);
}

TEST_F(StalledDiskTest, LandingsDuringTheStallEndAtOnce) {
  MakeBoth();
  const Match match = rig_->Lookup(kSession, Plan(kOnDisk));
  rig_->StallDisk();
  const TestPages pages(16);
  const auto landing = rig_->StartLanding(kSession, 100, match.lease, TestTarget(pages, {{0, 100}}));
  rig_->executor.CompleteAll();
  EXPECT_THAT(landing->verdict, ::testing::Optional(ElementsAre(MissReason::kTierError)));
  rig_->cache->Release(kSession, match.lease);
  rig_->EndStall();
}

TEST_F(StalledDiskTest, AnEngineMayPublishAgainWhatOnlyTheDiskHas) {
  MakeBoth();
  rig_->StallDisk();
  ASSERT_TRUE(rig_->Publish(kSession, Plan(kOnDisk), kOnDisk));
  EXPECT_EQ(Land(kOnDisk), TierKind::kDram);
  rig_->EndStall();
  EXPECT_EQ(Land(kOnDisk), TierKind::kDram);
  rig_->Settle();
  EXPECT_EQ(Used(*rig_->ssd), 6u) << "the old copy's place is free again";
}

TEST_F(StalledDiskTest, MemoryThatTheDiskMayStillWriteIsNotReused) {
  Make({.hbm = 0, .dram = 3, .ssd = 64});
  PublishAndSettle(kOnDisk);
  Restart();
  const Match match = rig_->Lookup(kSession, Plan(kOnDisk));
  ASSERT_GT(rig_->io.pending(), 0u);
  rig_->StallDisk();
  rig_->cache->Release(kSession, match.lease);
  EXPECT_EQ(rig_->cache->Reserve(kSession, Plan(kInMemory)).outcome, ReserveOutcome::kNoSpace);
  rig_->EndStall();
  EXPECT_TRUE(rig_->Publish(kSession, Plan(kInMemory), kInMemory));
}

TEST_F(StalledDiskTest, CopiesBetweenTiersOfMemoryContinue) {
  constexpr uint64_t kTexts = 40, kFresh = 100;  // more pieces than may be in flight at once
  Make({.hbm = 4 * kTexts, .dram = 4 * kTexts, .ssd = 4 * kTexts});
  for (uint64_t text = 1; text <= kTexts; ++text) PublishAndSettle(text);
  Restart();
  std::vector<LeaseId> leases;
  for (uint64_t text = 1; text <= kTexts; ++text) leases.push_back(rig_->Lookup(kSession, Plan(text)).lease);
  rig_->StallDisk();
  ASSERT_TRUE(rig_->Publish(kSession, Plan(kFresh), kFresh));
  rig_->executor.CompleteAll();
  EXPECT_THAT(Where(kFresh), ElementsAre(TierKind::kHbm, TierKind::kDram));
  for (const LeaseId& lease : leases) rig_->cache->Release(kSession, lease);
  rig_->EndStall();
}

TEST_F(StalledDiskTest, ADrainDoesNotWaitForTheDisk) {
  MakeBoth();
  ASSERT_TRUE(rig_->Publish(kSession, Plan(3), 3));  // being written
  rig_->cache->offers().StartDrain();
  EXPECT_TRUE(rig_->cache->stats().memory_only.writing);
  rig_->StallDisk();
  EXPECT_FALSE(rig_->cache->stats().memory_only.writing);
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 1u);
  rig_->cache->offers().EndDrain();
  rig_->EndStall();
}

TEST_F(StalledDiskTest, AResumedProcessChecksTheDiskAtTheNextTick) {
  MakeBoth();
  rig_->cache->Tick();
  rig_->clock.Advance(SsdHealth::kDeadline);
  rig_->StallDisk();
  EXPECT_FALSE(rig_->ssd->health().stalled()) << "the disk may have been well all the time";
  rig_->StallDisk();
  EXPECT_TRUE(rig_->ssd->health().stalled());
  rig_->EndStall();
}

TEST_F(StalledDiskTest, ASuccessDuringAHungOperationIsNotARecovery) {
  MakeBoth();
  rig_->StallDisk();
  for (int i = 0; i < 8; ++i) rig_->LetDiskRecover();  // probes succeed
  EXPECT_TRUE(rig_->ssd->health().degraded());
  EXPECT_EQ(Ask(kOnDisk).reason, MissReason::kTierError);
  rig_->EndStall();
  EXPECT_FALSE(rig_->ssd->health().degraded());
}

}  // namespace
}  // namespace ashlar::storage
