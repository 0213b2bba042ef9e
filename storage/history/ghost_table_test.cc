// SPDX-License-Identifier: Apache-2.0
#include "storage/history/ghost_table.h"

#include <gtest/gtest.h>

namespace ashlar::storage {
namespace {

Key MakeKey(uint8_t number) {
  Key key;
  key.bytes.fill(number);
  return key;
}

MissReason Why(const GhostTable& table, TenantId tenant, uint8_t key) {
  const Ghost* ghost = table.Find(tenant, MakeKey(key));
  return ghost == nullptr ? MissReason::kNeverSeen : ghost->reason;
}

TEST(GhostTable, ReturnsRememberedGhost) {
  GhostTable table(8);
  EXPECT_EQ(table.Find(1, MakeKey(7)), nullptr);
  table.Remember(1, MakeKey(7),
                 {.reason = MissReason::kEvicted,
                  .policy = PolicyKind::kLru,
                  .tier = TierKind::kSsd,
                  .uses = 3,
                  .bytes = 1000,
                  .gone_at = 50,
                  .lived = 40,
                  .idle = 10});
  const Ghost* ghost = table.Find(1, MakeKey(7));
  ASSERT_NE(ghost, nullptr);
  EXPECT_EQ(ghost->reason, MissReason::kEvicted);
  EXPECT_EQ(ghost->policy, PolicyKind::kLru);
  EXPECT_EQ(ghost->tier, TierKind::kSsd);
  EXPECT_EQ(ghost->uses, 3u);
  EXPECT_EQ(ghost->bytes, 1000u);
  EXPECT_EQ(ghost->gone_at, 50);
  EXPECT_EQ(ghost->lived, 40);
  EXPECT_EQ(ghost->idle, 10);
  table.Remember(1, MakeKey(7), {.reason = MissReason::kAbandoned});
  EXPECT_EQ(Why(table, 1, 7), MissReason::kAbandoned) << "the last thing that happened";
  EXPECT_EQ(table.size(1), 1u);
  table.Erase(1, MakeKey(7));
  table.Erase(1, MakeKey(7));
  table.Erase(9, MakeKey(7));
  EXPECT_EQ(Why(table, 1, 7), MissReason::kNeverSeen);
}

TEST(GhostTable, SeparatesTenants) {
  GhostTable table(2);
  table.Remember(1, MakeKey(7), {.reason = MissReason::kEvicted});
  EXPECT_EQ(Why(table, 2, 7), MissReason::kNeverSeen);
  for (const uint8_t churn : {1, 2, 3, 4, 5}) table.Remember(2, MakeKey(churn), {.reason = MissReason::kExpired});
  EXPECT_EQ(Why(table, 1, 7), MissReason::kEvicted) << "another tenant's churn displaces nothing";
  EXPECT_EQ(table.size(1), 1u);
  EXPECT_EQ(table.size(2), 2u);
}

TEST(GhostTable, ZeroCapacityRemembersNothing) {
  GhostTable table(0);
  table.Remember(1, MakeKey(7), {.reason = MissReason::kEvicted});
  EXPECT_EQ(Why(table, 1, 7), MissReason::kNeverSeen);
  EXPECT_EQ(table.size(1), 0u);
}

}  // namespace
}  // namespace ashlar::storage
