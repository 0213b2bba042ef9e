// SPDX-License-Identifier: Apache-2.0
// Drains: objects that are only in memory are written to the disk, and no new work begins.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "storage/testing/tenants.h"
#include "storage/testing/tiered_rig.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class DrainTest : public ::testing::Test {
 protected:
  void Make(const TieredOptions& options) {
    rig_.emplace(options);
    rig_->cache->OpenSession(kAnn, 1);
  }
  ~DrainTest() override {
    rig_->cache->CloseSession(kAnn, [] {});
    rig_->Settle();
  }
  // 3 extents each.
  static ObjectHeader Plan(uint64_t text) { return TestPlan(text, 64); }
  void Publish(std::vector<uint64_t> texts) {
    for (const uint64_t text : texts) {
      ASSERT_TRUE(rig_->Publish(kAnn, Plan(text), text));
      rig_->Settle();
    }
  }
  MissReason Ask(uint64_t text) {
    const Match match = rig_->Lookup(kAnn, Plan(text));
    rig_->cache->Release(kAnn, match.lease);
    return match.found[0].reason;
  }
  void Drain() {
    rig_->cache->offers().StartDrain();
    rig_->Settle();
    EXPECT_FALSE(rig_->cache->stats().memory_only.writing);
  }
  void Restart() {
    rig_->disk.Crash();  // unsynced writes are lost as well
    rig_->Restart();
    rig_->cache->OpenSession(kAnn, 1);
  }
  // Returns the texts among 1 to 9 that are found.
  std::vector<uint64_t> Found() {
    std::vector<uint64_t> found;
    for (uint64_t text = 1; text <= 9; ++text) {
      if (Ask(text) == MissReason::kNone) found.push_back(text);
    }
    return found;
  }

  std::optional<TieredRig> rig_;
};

TEST_F(DrainTest, ARestartFindsDrainedObjects) {
  Make({.admission = AdmissionMode::kSecondUse});
  Publish({1, 2});
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 2u) << "used once only";
  EXPECT_EQ(rig_->cache->stats().memory_only.bytes, 2 * Plan(1).bytes);
  Drain();
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 0u);
  EXPECT_EQ(rig_->cache->stats().memory_only.bytes, 0u);
  Restart();
  EXPECT_THAT(Found(), ElementsAre(1, 2));
}

TEST_F(DrainTest, MemoryIsLostWithoutDrain) {
  Make({.admission = AdmissionMode::kSecondUse});
  Publish({1, 2});
  Restart();
  EXPECT_THAT(Found(), IsEmpty());
}

TEST_F(DrainTest, WritesTopOnlyObjectsToDisk) {
  Make({.hbm = 8, .dram = 4, .admission = AdmissionMode::kSecondUse});
  Publish({1, 2});  // dram has evicted the first one
  ASSERT_THAT(rig_->cache->upkeep().inventory().Where(1, Plan(1).key), ElementsAre(TierKind::kHbm));
  Drain();
  Restart();
  EXPECT_THAT(Found(), ElementsAre(1, 2));
}

TEST_F(DrainTest, WritesTheMostUsedFirstWithoutEviction) {
  Make({.hbm = 0, .dram = 32, .ssd = 10, .admission = AdmissionMode::kSecondUse});
  Publish({1});
  EXPECT_EQ(Ask(1), MissReason::kNone);  // a second use
  rig_->Settle();
  rig_->disk.set_faults({.write_error = 1});
  Publish({2, 3, 4, 5});
  for (const uint64_t text : {3, 5, 5}) EXPECT_EQ(Ask(text), MissReason::kNone);
  rig_->Settle();
  ASSERT_TRUE(rig_->cache->retention().Pin(1, Plan(2).key, 0));
  rig_->disk.set_faults({});
  ASSERT_EQ(rig_->cache->stats().memory_only.objects, 4u);
  Drain();
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 2u) << "there is space for two";
  Restart();
  EXPECT_THAT(Found(), ElementsAre(1, 2, 5)) << "what was there, what is pinned, what was used most";
}

TEST_F(DrainTest, RefusesNewWorkAndFinishesWorkInFlight) {
  Make({.hbm = 0, .admission = AdmissionMode::kSecondUse});
  Publish({1});
  const Match held = rig_->Lookup(kAnn, Plan(1));
  const Cache::Reservation reserved = rig_->cache->Reserve(kAnn, Plan(2));
  rig_->cache->offers().StartDrain();
  rig_->cache->offers().StartDrain();  // a second call
  EXPECT_TRUE(rig_->cache->stats().memory_only.writing);
  EXPECT_EQ(Ask(1), MissReason::kDaemonUnavailable);
  EXPECT_EQ(rig_->cache->Reserve(kAnn, Plan(3)).outcome, ReserveOutcome::kUnavailable);

  std::optional<PublishOutcome> published;
  rig_->cache->Publish(kAnn, reserved.id, TestSource(Plan(2), 2), [&](PublishOutcome outcome) { published = outcome; });
  const TestPages pages(16);
  const auto landing = rig_->StartLanding(kAnn, 1, held.lease, TestTarget(pages, {{0, 100}}));
  rig_->Settle();
  EXPECT_EQ(published, PublishOutcome::kPublished);
  EXPECT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 0u) << "what was published meanwhile is there, too";
  Restart();
  EXPECT_THAT(Found(), ElementsAre(1, 2));
}

TEST_F(DrainTest, EndDrainEndsIt) {
  Make({.hbm = 0, .admission = AdmissionMode::kSecondUse});
  Publish({1});
  Drain();
  rig_->cache->offers().EndDrain();
  EXPECT_EQ(Ask(1), MissReason::kNone);
  Publish({2});
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 1u) << "admission is asked again";
}

TEST_F(DrainTest, ADiskErrorEndsTheDrain) {
  Make({.hbm = 0, .admission = AdmissionMode::kSecondUse});
  Publish({1, 2});
  rig_->disk.set_faults({.write_error = 1});
  Drain();
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 2u) << "told as not written";
}

// After a power cut at any point of a drain, objects on the disk are whole and others are absent.
TEST_F(DrainTest, AKillDuringTheDrainDoesNoHarm) {
  for (size_t steps = 0; steps < 12; ++steps) {
    SCOPED_TRACE(steps);
    Make({.hbm = 0, .admission = AdmissionMode::kSecondUse, .seed = steps + 1});
    Publish({1, 2, 3});
    rig_->cache->offers().StartDrain();
    for (size_t i = 0; i < steps && rig_->io.pending() > 0; ++i) rig_->io.Complete(0);
    Restart();
    for (const uint64_t text : {1, 2, 3}) {
      const Match match = rig_->Lookup(kAnn, Plan(text));
      if (match.found[0].reason != MissReason::kNone) {
        EXPECT_EQ(match.found[0].reason, MissReason::kNeverSeen);
        continue;
      }
      const TestPages pages(16);
      const auto landing = rig_->StartLanding(kAnn, text, match.lease, TestTarget(pages, {{0, 100}}));
      rig_->Settle();
      EXPECT_THAT(landing->verdict.value(), ElementsAre(MissReason::kNone));
      EXPECT_LT(LandingError(pages, Plan(text), text, 100), 1e-5);
      rig_->cache->Release(kAnn, match.lease);
    }
    rig_->cache->CloseSession(kAnn, [] {});
    rig_->Settle();
  }
}

// In a drain, other nodes take objects that wait for the disk. The disk writes none that a node takes, and the reverse.
TEST_F(DrainTest, OtherNodesTakeObjectsThatTheDiskHasNotStarted) {
  Make({.ssd = 3, .admission = AdmissionMode::kSecondUse});  // space for one object
  Publish({1, 2, 3});
  Offers& offers = rig_->cache->offers();
  EXPECT_FALSE(offers.NextForTransfer().has_value()) << "only in a drain";
  rig_->cache->offers().StartDrain();
  const std::optional<Offering> accepted = offers.NextForTransfer(), declined = offers.NextForTransfer();
  ASSERT_TRUE(accepted.has_value() && declined.has_value());
  EXPECT_NE(accepted->key, declined->key);
  EXPECT_EQ(accepted->bytes, Plan(1).bytes);
  EXPECT_FALSE(offers.NextForTransfer().has_value()) << "the disk has begun with the last one";
  offers.TransferEnded(1, accepted->key, true);
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 2u);
  offers.TransferEnded(1, declined->key, false);
  EXPECT_FALSE(offers.NextForTransfer().has_value()) << "it was offered once";
  rig_->Settle();
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 1u);
  // The drain is cancelled, and objects that other nodes took are again only in memory.
  rig_->cache->offers().EndDrain();
  EXPECT_EQ(rig_->cache->stats().memory_only.objects, 2u);
  EXPECT_THAT(rig_->cache->upkeep().inventory().Where(1, accepted->key), testing::Not(IsEmpty()));
}

}  // namespace
}  // namespace ashlar::storage
