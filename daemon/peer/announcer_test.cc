#include "daemon/peer/announcer.h"

#include <gtest/gtest.h>

#include "daemon/peer/testing/peer_node.h"

namespace ashlar::daemon {
namespace {

using storage::Residence;
using storage::TestPlan;

class AnnouncerTest : public ::testing::Test {
 protected:
  AnnouncerTest() { directory_.member = std::make_shared<const Member>(Member{.node = "a", .incarnation = 1}); }

  TierKind Resides(const Residence& residence) {
    return announcer_.Resides({0, storage::PoolKind::kPublic}, TestPlan(1, 64), residence);
  }
  std::optional<uint8_t> TheGpu() { return cluster_.told.at(0).holding.gpu; }

  TestCluster cluster_;
  TestDirectory directory_{cluster_, "a"};
  Announcer announcer_{directory_, AnnounceMode::kAll, {4, std::nullopt, 6}};
};

TEST_F(AnnouncerTest, SaysWhichGpuHasACopy) {
  EXPECT_EQ(Resides({.nearest = TierKind::kHbm, .level = 2}), TierKind::kHbm);
  EXPECT_EQ(TheGpu(), 6);
  // It is on another GPU now.
  Residence moved{.nearest = TierKind::kHbm, .told = TierKind::kHbm, .was = TierKind::kHbm, .level = 0, .was_level = 2};
  EXPECT_EQ(Resides(moved), TierKind::kHbm);
  EXPECT_EQ(TheGpu(), 4);
  EXPECT_EQ(Resides({.nearest = TierKind::kDram, .told = TierKind::kHbm, .was = TierKind::kHbm, .level = 3}),
            TierKind::kDram);
  EXPECT_EQ(TheGpu(), std::nullopt) << "no GPU has it any more";
  // From dram to a GPU it is memory all the same, and costs etcd no write.
  cluster_.told.clear();
  EXPECT_EQ(Resides({.nearest = TierKind::kHbm, .told = TierKind::kDram, .was = TierKind::kDram, .was_level = 3}),
            TierKind::kDram);
  EXPECT_TRUE(cluster_.told.empty());
  EXPECT_EQ(Resides({.nearest = TierKind::kSsd, .told = TierKind::kHbm, .was = TierKind::kHbm, .level = 4}),
            TierKind::kSsd);
  EXPECT_EQ(TheGpu(), std::nullopt);
}

TEST_F(AnnouncerTest, SaysNoGpuWhereNoneIsConfigured) {
  EXPECT_EQ(Resides({.nearest = TierKind::kHbm, .level = 1}), TierKind::kHbm);
  EXPECT_EQ(TheGpu(), std::nullopt) << "a tier that lies in the processor's memory";
  EXPECT_EQ(Resides({.nearest = TierKind::kDram, .level = 0}), TierKind::kDram);
  EXPECT_EQ(TheGpu(), std::nullopt);
}

}  // namespace
}  // namespace ashlar::daemon
