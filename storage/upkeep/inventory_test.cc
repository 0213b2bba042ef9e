// SPDX-License-Identifier: Apache-2.0
// Objects listed in pages and slices, while others are added and evicted.
#include "storage/upkeep/inventory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "storage/testing/tiers_fixture.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class InventoryTest : public TiersTest {
 protected:
  const Inventory& inventory() { return rig_->cache->upkeep().inventory(); }
  std::vector<Listed> All(const Selection& selection = {}) {
    std::vector<Listed> all;
    ObjectId after = 0;
    Slice whole;
    EXPECT_TRUE(inventory().List(selection, SIZE_MAX, after, all, whole));
    return all;
  }
};

TEST_F(InventoryTest, ListsEachObjectOnceWithItsDetails) {
  Make({.hbm = 0, .dram = 7, .ssd = 64});
  for (const uint64_t text : {1, 2, 3}) PublishAndSettle(text);
  rig_->clock.Advance(5);
  const Match match = rig_->Lookup(kSession, Plan(3));
  rig_->clock.Advance(2);
  const std::vector<Listed> all = All();
  ASSERT_THAT(all, SizeIs(3));
  EXPECT_EQ(all[0].key, Plan(1).key);
  EXPECT_THAT(all[0].tiers, ElementsAre(TierKind::kSsd)) << "memory has space for two";
  EXPECT_EQ(all[0].age, 7);
  EXPECT_EQ(all[0].idle, 7);
  EXPECT_EQ(all[2].key, Plan(3).key);
  EXPECT_EQ(all[2].ns, Plan(3).ns);
  EXPECT_EQ(all[2].kind, ObjectKind::kSegment);
  EXPECT_EQ(all[2].tokens, 64u);
  EXPECT_EQ(all[2].bytes, Plan(3).bytes);
  EXPECT_EQ(all[2].uses, 1u);
  EXPECT_EQ(all[2].references, 1u);
  EXPECT_EQ(all[2].idle, 2);
  EXPECT_THAT(all[2].tiers, ElementsAre(TierKind::kDram, TierKind::kSsd));
  rig_->cache->Release(kSession, match.lease);
}

TEST_F(InventoryTest, SelectsByTenantNamespaceKindAndTier) {
  Make({.hbm = 0, .dram = 7, .ssd = 64});
  rig_->cache->OpenSession(2, 2);
  for (const uint64_t text : {1, 2, 3}) PublishAndSettle(text);
  ASSERT_TRUE(rig_->Publish(2, TestPlan(1, 64, ObjectKind::kCheckpoint, 2), 1));
  rig_->Settle();
  EXPECT_THAT(All({.tenant = 1}), SizeIs(3));
  EXPECT_THAT(All({.tenant = 2}), SizeIs(1));
  EXPECT_THAT(All({.ns = Plan(1).ns}), SizeIs(3));
  EXPECT_THAT(All({.kind = ObjectKind::kCheckpoint}), SizeIs(1));
  EXPECT_THAT(All({.tenant = 1, .tier = TierKind::kDram}), SizeIs(2));
  EXPECT_THAT(All({.tenant = 2, .kind = ObjectKind::kSegment}), IsEmpty());
  Inventory::Tally tally;
  ObjectId after = 0;
  Slice whole;
  EXPECT_TRUE(inventory().Count({.tenant = 1}, after, tally, whole));
  EXPECT_EQ(tally.objects, 3u);
  EXPECT_EQ(tally.bytes, 3 * Plan(1).bytes);
  EXPECT_EQ(tally.tier_bytes[static_cast<size_t>(TierKind::kDram)], 2 * Plan(1).bytes);
  EXPECT_EQ(tally.tier_bytes[static_cast<size_t>(TierKind::kSsd)], 3 * Plan(1).bytes);
  rig_->cache->CloseSession(2, [] {});
}

TEST_F(InventoryTest, PagesAndSlicesListEveryLastingObject) {
  Make({.hbm = 0, .dram = 64, .ssd = 0});
  for (uint64_t text = 1; text <= 12; ++text) PublishAndSettle(text);
  std::set<Key> seen;
  ObjectId after = 0;
  int slices = 0;
  for (bool ended = false; !ended; ++slices) {
    std::vector<Listed> page;
    Slice one(2);
    ended = inventory().List({.tenant = 1}, 3, after, page, one);
    EXPECT_LE(page.size(), 2u) << "no more steps than the slice has";
    for (const Listed& object : page) EXPECT_TRUE(seen.insert(object.key).second) << "listed twice";
    // Objects are added and removed meanwhile.
    if (slices == 1) rig_->cache->retention().Evict(1, Plan(1).key);
    if (slices == 2) PublishAndSettle(13);
  }
  EXPECT_GE(slices, 6);
  for (uint64_t text = 2; text <= 13; ++text) EXPECT_TRUE(seen.contains(Plan(text).key)) << text;
}

}  // namespace
}  // namespace ashlar::storage
