// SPDX-License-Identifier: Apache-2.0
// All copies are verified at the requested rate, and corrupt ones become misses.
#include "storage/upkeep/scrubber.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "storage/testing/tiers_fixture.h"

namespace ashlar::storage {
namespace {

using limits::kExtentBytes;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr size_t kDram = static_cast<size_t>(TierKind::kDram), kSsd = static_cast<size_t>(TierKind::kSsd);
constexpr Nanos kTick = 50'000'000;
constexpr uint64_t kFast = uint64_t{1} << 40;

class ScrubberTest : public TiersTest {
 protected:
  Scrubber& scrubber() { return rig_->cache->upkeep().scrubber(); }
  const Scrubber::Report& report() { return scrubber().report(); }
  void Tick() {
    rig_->clock.Advance(kTick);
    scrubber().Tick();
    rig_->Settle();
  }
  void Verify(uint64_t rate = kFast) {
    scrubber().Start(rate);
    for (int ticks = 0; ticks < 1000 && report().running; ++ticks) Tick();
    EXPECT_FALSE(report().running);
  }
  Slot SlotOf(uint64_t text) {
    const Match match = rig_->Lookup(kSession, Plan(text));
    const Slot slot = *match.found[0].slot;
    rig_->cache->Release(kSession, match.lease);
    return slot;
  }
  // Flips a bit of every extent on the disk but its header's.
  void DamageDisk() {
    for (uint64_t at = kExtentBytes; at < rig_->disk.file().size(); at += kExtentBytes) {
      rig_->disk.FlipBit(at + 5000, 3);
    }
  }
};

TEST_F(ScrubberTest, EveryCopyOfEveryTierIsRead) {
  Make({.hbm = 4, .dram = 16, .ssd = 64});
  for (const uint64_t text : {1, 2, 3}) PublishAndSettle(text);
  Verify();
  EXPECT_EQ(report().copies[static_cast<size_t>(TierKind::kHbm)], 1u);
  EXPECT_EQ(report().copies[kDram], 3u);
  EXPECT_EQ(report().copies[kSsd], 3u);
  EXPECT_EQ(report().bytes[kSsd], 3 * Plan(1).bytes);
  EXPECT_THAT(report().findings, IsEmpty());
  EXPECT_EQ(scrubber().totals().passes, 1u);
  EXPECT_EQ(scrubber().totals().last_ended, report().ended);
  for (const uint64_t text : {1, 2, 3}) EXPECT_NE(Land(text), TierKind::kNone) << "nothing was dropped";
}

TEST_F(ScrubberTest, ADamagedObjectIsAMiss) {
  Make({.hbm = 0, .dram = 16, .ssd = 0});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  Corrupt(*rig_->dram, SlotOf(2), Plan(2), 0, PartForm::kState);
  Verify();
  ASSERT_THAT(report().findings, SizeIs(1));
  EXPECT_EQ(report().findings[0].key, Plan(2).key);
  EXPECT_EQ(report().findings[0].tier, TierKind::kDram);
  EXPECT_EQ(report().findings[0].reason, MissReason::kChecksumFailed);
  EXPECT_EQ(report().damaged[kDram], 1u);
  EXPECT_EQ(Ask(2).reason, MissReason::kChecksumFailed);
  EXPECT_EQ(Ask(1).reason, MissReason::kNone);
  EXPECT_EQ(Used(*rig_->dram), 3u);
}

TEST_F(ScrubberTest, ADamagedHeaderIsFoundToo) {
  Make({.hbm = 0, .dram = 16, .ssd = 0});
  PublishAndSettle(1);
  const Slot slot = SlotOf(1);
  CorruptHeader(*rig_->dram, slot, 20);
  Verify();
  EXPECT_EQ(report().damaged[kDram], 1u);
  EXPECT_NE(Ask(1).reason, MissReason::kNone);
}

TEST_F(ScrubberTest, DropsOnlyDamagedCopy) {
  Make({.hbm = 0, .dram = 16, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  DamageDisk();
  Verify();
  EXPECT_EQ(report().damaged[kSsd], 2u);
  EXPECT_EQ(report().damaged[kDram], 0u);
  for (const uint64_t text : {1, 2}) EXPECT_EQ(Land(text), TierKind::kDram) << "memory has it whole";
  Verify();
  EXPECT_EQ(report().damaged[kSsd], 0u) << "no damaged copy is left";

  Corrupt(*rig_->dram, SlotOf(1), Plan(1), 1, PartForm::kKeys);
  rig_->Settle();
  Verify();
  EXPECT_EQ(report().damaged[kDram], 1u);
}

TEST_F(ScrubberTest, DamageOnDiskIsFoundBeforeARead) {
  Make({.hbm = 0, .dram = 16, .ssd = 64});
  for (const uint64_t text : {1, 2}) PublishAndSettle(text);
  Restart();
  DamageDisk();
  Verify();
  EXPECT_EQ(report().damaged[kSsd], 2u);
  for (const uint64_t text : {1, 2}) EXPECT_EQ(Ask(text).reason, MissReason::kChecksumFailed);
  EXPECT_EQ(Used(*rig_->ssd), 0u);
  EXPECT_EQ(rig_->cache->stats().objects, 0u);
}

TEST_F(ScrubberTest, ACopyThatCannotBeReadIsALoss) {
  Make({.hbm = 0, .dram = 16, .ssd = 64});
  PublishAndSettle(1);
  Restart();
  rig_->disk.set_faults({.read_error = 1});
  Verify();
  ASSERT_THAT(report().findings, SizeIs(1));
  EXPECT_EQ(report().findings[0].reason, MissReason::kTierError);
  EXPECT_EQ(Ask(1).reason, MissReason::kTierError);
}

TEST_F(ScrubberTest, ADamagedLeasedObjectStaysOnlyForItsLease) {
  Make({.hbm = 0, .dram = 16, .ssd = 0});
  PublishAndSettle(1);
  const Match match = rig_->Lookup(kSession, Plan(1));
  Corrupt(*rig_->dram, *match.found[0].slot, Plan(1), 0, PartForm::kState);
  Verify();
  EXPECT_EQ(report().damaged[kDram], 1u);
  EXPECT_EQ(Ask(1).reason, MissReason::kChecksumFailed);
  EXPECT_EQ(Used(*rig_->dram), 3u);
  rig_->cache->Release(kSession, match.lease);
  EXPECT_EQ(Used(*rig_->dram), 0u);
}

TEST_F(ScrubberTest, TheRateIsKept) {
  Make({.hbm = 0, .dram = 64, .ssd = 0});
  for (uint64_t text = 1; text <= 10; ++text) PublishAndSettle(text);
  // An object in ten ticks.
  const uint64_t rate = Plan(1).bytes * 1'000'000'000 / kTick / 10;
  scrubber().Start(rate);
  const Nanos began = rig_->clock.Now();
  for (int ticks = 0; ticks < 1000 && report().running; ++ticks) {
    Tick();
    const double seconds = static_cast<double>(rig_->clock.Now() - began) * 1e-9;
    EXPECT_LE(static_cast<double>(report().bytes[kDram]),
              static_cast<double>(rate) * (seconds + 0.25) + static_cast<double>(Plan(1).bytes));
  }
  EXPECT_EQ(report().copies[kDram], 10u);
  EXPECT_GE(report().ended - report().began, 9 * 10 * kTick - 300'000'000);
}

TEST_F(ScrubberTest, BackgroundPassesRepeat) {
  Make({.hbm = 0, .dram = 64, .ssd = 64});
  scrubber().SetRate(kFast);
  for (int ticks = 0; ticks < 10; ++ticks) Tick();
  EXPECT_EQ(scrubber().totals().passes, 0u) << "of nothing";
  PublishAndSettle(1);
  for (int ticks = 0; ticks < 10; ++ticks) Tick();
  EXPECT_GE(scrubber().totals().passes, 2u);
  EXPECT_FALSE(report().asked);
  scrubber().SetRate(0);
  for (int ticks = 0; ticks < 3; ++ticks) Tick();
  const uint64_t passes = scrubber().totals().passes;
  for (int ticks = 0; ticks < 10; ++ticks) Tick();
  EXPECT_EQ(scrubber().totals().passes, passes) << "0: none";
  EXPECT_FALSE(report().running);
}

TEST_F(ScrubberTest, AFullExecutorIsTriedAgain) {
  Make({.hbm = 0, .dram = 16, .ssd = 64});
  PublishAndSettle(1);
  rig_->executor.set_capacity(0);
  scrubber().Start(kFast);
  for (int ticks = 0; ticks < 5; ++ticks) Tick();
  EXPECT_TRUE(report().running);
  rig_->executor.set_capacity(64);
  for (int ticks = 0; ticks < 10; ++ticks) Tick();
  EXPECT_EQ(report().copies[kDram], 1u);
  EXPECT_EQ(report().copies[kSsd], 1u);
}

// Between any two steps of a check the object may end.
TEST_F(ScrubberTest, AnObjectMayEndWhileItIsVerified) {
  for (size_t steps = 0; steps < 8; ++steps) {
    SCOPED_TRACE(steps);
    Make({.hbm = 0, .dram = 16, .ssd = 64});
    PublishAndSettle(1);
    scrubber().Start(kFast);
    for (size_t i = 0; i < steps; ++i) {
      rig_->clock.Advance(kTick);
      scrubber().Tick();
      if (rig_->executor.pending() > 0) rig_->executor.Complete(0);
      if (rig_->io.pending() > 0) rig_->io.Complete(0);
    }
    rig_->clock.Advance(kTick);
    scrubber().Tick();
    rig_->cache->retention().Evict(1, Plan(1).key);
    for (int ticks = 0; ticks < 10; ++ticks) Tick();
    EXPECT_FALSE(report().running);
    EXPECT_EQ(Used(*rig_->dram), 0u);
    EXPECT_EQ(Used(*rig_->ssd), 0u);
    EXPECT_EQ(rig_->cache->stats().objects, 0u);
  }
}

}  // namespace
}  // namespace ashlar::storage
