#include "storage/policy/bring_up.h"

#include <gtest/gtest.h>

namespace ashlar::storage {
namespace {

TEST(BringUpCost, TakesWhatIsNotKnownToBeDear) {
  BringUpCost cost;
  EXPECT_EQ(cost.Estimate(TierKind::kSsd, 1 << 20), 0);
  EXPECT_TRUE(cost.Pays(TierKind::kSsd, 1 << 20, 1)) << "nothing was measured";
  cost.Measured(TierKind::kSsd, 1000, 5000);
  EXPECT_EQ(cost.Estimate(TierKind::kSsd, 100), 500);
  EXPECT_TRUE(cost.Pays(TierKind::kSsd, 100, 500));
  EXPECT_FALSE(cost.Pays(TierKind::kSsd, 100, 499));
  EXPECT_TRUE(cost.Pays(TierKind::kSsd, 100, 0)) << "the engine did not say what computing takes";
  EXPECT_TRUE(cost.Pays(TierKind::kDram, 100, 1)) << "another tier";
}

TEST(BringUpCost, FollowsTheTierAsItChanges) {
  BringUpCost cost;
  cost.Measured(TierKind::kSsd, 1000, 8000);
  for (int i = 0; i < 60; ++i) cost.Measured(TierKind::kSsd, 1000, 1000);
  EXPECT_NEAR(static_cast<double>(cost.Estimate(TierKind::kSsd, 1000)), 1000, 10);
}

TEST(BringUpCost, ProbesATierThatWasSlowOnce) {
  BringUpCost cost;
  cost.Measured(TierKind::kSsd, 1000, 8000);
  int taken = 0;
  for (int i = 0; i < 64; ++i) taken += cost.Pays(TierKind::kSsd, 1000, 1) ? 1 : 0;
  EXPECT_EQ(taken, 4);
}

}  // namespace
}  // namespace ashlar::storage
