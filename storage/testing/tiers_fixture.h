// SPDX-License-Identifier: Apache-2.0
// A test that publishes, asks and lands through several tiers, one line each.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "storage/testing/tiered_rig.h"

namespace ashlar::storage {

class TiersTest : public ::testing::Test {
 protected:
  static constexpr SessionId kSession = 1;

  void Make(const TieredOptions& options) {
    rig_ = std::make_unique<TieredRig>(options);
    rig_->cache->OpenSession(kSession, 1);
  }
  ~TiersTest() override {
    if (rig_ == nullptr) return;
    rig_->cache->CloseSession(kSession, [] {});
    rig_->Settle();
  }

  void Restart() {
    rig_->Restart();
    rig_->cache->OpenSession(kSession, 1);
  }

  // 3 extents each.
  static ObjectHeader Plan(uint64_t text) { return TestPlan(text, 64); }
  void PublishAndSettle(uint64_t text) {
    ASSERT_TRUE(rig_->Publish(kSession, Plan(text), text));
    rig_->Settle();
  }
  Found Ask(uint64_t text) {
    const Match match = rig_->Lookup(kSession, Plan(text));
    rig_->cache->Release(kSession, match.lease);
    return match.found[0];
  }
  // Looks up, lands and checks every byte. Returns the tier, or kNone for a miss; `reason_` has its reason.
  TierKind Land(uint64_t text) {
    const Match match = rig_->Lookup(kSession, Plan(text));
    reason_ = match.found[0].reason;
    if (reason_ != MissReason::kNone) return TierKind::kNone;
    const TestPages pages(16);
    const auto landing = rig_->StartLanding(kSession, ++landings_, match.lease, TestTarget(pages, {{0, 100}}));
    rig_->Settle();
    reason_ = landing->verdict.value()[0];
    if (reason_ == MissReason::kNone) {
      EXPECT_LT(LandingError(pages, Plan(text), text, 100), 1e-5);
      const MemoryTier& top = rig_->hbm != nullptr ? *rig_->hbm : *rig_->dram;
      EXPECT_EQ(TupleError(top, *match.found[0].slot, *match.found[0].header, text), 0.0);
    }
    rig_->cache->Release(kSession, match.lease);
    return reason_ == MissReason::kNone ? match.found[0].tier : TierKind::kNone;
  }
  uint64_t Used(const Tier& tier) { return tier.Usage(1).used_bytes / limits::kExtentBytes; }

  std::unique_ptr<TieredRig> rig_;
  MissReason reason_ = MissReason::kNone;
  LandingId landings_ = 0;
};

}  // namespace ashlar::storage
