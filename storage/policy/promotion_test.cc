// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/promotion.h"

#include <gtest/gtest.h>

namespace ashlar::storage {
namespace {

TEST(PromotionCost, AcceptsUnknownCosts) {
  PromotionCost cost;
  EXPECT_EQ(cost.Estimate(TierKind::kSsd, 1 << 20), 0);
  EXPECT_TRUE(cost.Pays(TierKind::kSsd, 1 << 20, 1)) << "nothing was measured";
  EXPECT_TRUE(cost.PaysToKeep(1 << 20, 1));
  cost.Promoted(TierKind::kSsd, 1000, 0, 5000);
  EXPECT_EQ(cost.Estimate(TierKind::kSsd, 100), 500);
  EXPECT_TRUE(cost.Pays(TierKind::kSsd, 100, 500));
  EXPECT_FALSE(cost.Pays(TierKind::kSsd, 100, 499));
  EXPECT_TRUE(cost.Pays(TierKind::kSsd, 100, 0)) << "the engine did not say what computing takes";
  EXPECT_TRUE(cost.Pays(TierKind::kDram, 100, 1)) << "another tier";
  EXPECT_TRUE(cost.PaysToKeep(100, 1)) << "it will be at the top";
}

TEST(PromotionCost, AddsTheLandingToTheCopy) {
  PromotionCost cost;
  cost.Promoted(TierKind::kSsd, 1000, 0, 5000);
  cost.Landed(1000, 2000);
  EXPECT_EQ(cost.Estimate(TierKind::kSsd, 100), 700);
  EXPECT_EQ(cost.Estimate(TierKind::kDram, 100), 200) << "at the top there is nothing to copy";
  EXPECT_FALSE(cost.Pays(TierKind::kSsd, 100, 699));
  EXPECT_TRUE(cost.Pays(TierKind::kDram, 100, 200));
  EXPECT_FALSE(cost.Pays(TierKind::kDram, 100, 199));
  EXPECT_TRUE(cost.PaysToKeep(100, 200));
  EXPECT_FALSE(cost.PaysToKeep(100, 199));
  EXPECT_TRUE(cost.PaysToKeep(100, 0)) << "the engine did not say what computing takes";
}

TEST(PromotionCost, PrefetchedCopyIsFree) {
  PromotionCost cost;
  cost.Promoted(TierKind::kSsd, 1000, 0, 5000);
  cost.Landed(1000, 2000);
  EXPECT_EQ(cost.Estimate(TierKind::kSsd, 1000, 1000), 6000);
  EXPECT_EQ(cost.Estimate(TierKind::kSsd, 1000, 9000), 2000) << "a landing cannot be done ahead";
  EXPECT_TRUE(cost.Pays(TierKind::kSsd, 1000, 2000, 5000));
  EXPECT_FALSE(cost.Pays(TierKind::kSsd, 1000, 2000, 4999));
}

TEST(PromotionCost, FollowsTheTierAsItChanges) {
  PromotionCost cost;
  cost.Promoted(TierKind::kSsd, 1000, 0, 8000);
  for (int i = 0; i < 60; ++i) cost.Promoted(TierKind::kSsd, 1000, 0, 1000);
  EXPECT_NEAR(static_cast<double>(cost.Estimate(TierKind::kSsd, 1000)), 1000, 10);
}

TEST(PromotionCost, FixedCostOfSmallCopiesDoesNotInflateLargeOnes) {
  PromotionCost cost;
  for (int i = 0; i < 60; ++i) {
    cost.Landed(1'000, 50'000);
    cost.Landed(10'000'000, 1'000'000);
  }
  EXPECT_LT(cost.Estimate(TierKind::kDram, 10'000'000), 1'100'000);
}

TEST(PromotionCost, RetriesSlowCopiesRarely) {
  PromotionCost cost;
  cost.Promoted(TierKind::kSsd, 1000, 0, 8000);
  cost.Landed(1000, 8000);
  int taken = 0, kept = 0;
  for (int i = 0; i < 64; ++i) {
    taken += cost.Pays(TierKind::kSsd, 1000, 1) ? 1 : 0;
    kept += cost.PaysToKeep(1000, 1) ? 1 : 0;
  }
  EXPECT_EQ(taken, 4);
  EXPECT_EQ(kept, 4);
}

}  // namespace
}  // namespace ashlar::storage
