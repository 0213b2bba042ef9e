#include "storage/index/ghost_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

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

TEST(GhostTable, TellsAllThatItWasTold) {
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
  table.Forget(1, MakeKey(7));
  table.Forget(1, MakeKey(7));
  table.Forget(9, MakeKey(7));
  EXPECT_EQ(Why(table, 1, 7), MissReason::kNeverSeen);
}

TEST(GhostTable, NothingOfATenantShowsThroughToAnother) {
  GhostTable table(2);
  table.Remember(1, MakeKey(7), {.reason = MissReason::kEvicted});
  EXPECT_EQ(Why(table, 2, 7), MissReason::kNeverSeen);
  for (const uint8_t churn : {1, 2, 3, 4, 5}) table.Remember(2, MakeKey(churn), {.reason = MissReason::kExpired});
  EXPECT_EQ(Why(table, 1, 7), MissReason::kEvicted) << "another tenant's churn displaces nothing";
  EXPECT_EQ(table.size(1), 1u);
  EXPECT_EQ(table.size(2), 2u);
}

TEST(GhostTable, WithoutRoomRemembersNothing) {
  GhostTable table(0);
  table.Remember(1, MakeKey(7), {.reason = MissReason::kEvicted});
  EXPECT_EQ(Why(table, 1, 7), MissReason::kNeverSeen);
  EXPECT_EQ(table.size(1), 0u);
}

// Against a list, oldest first: whatever is remembered, replaced and forgotten, the oldest go first and nothing else.
TEST(GhostTable, ForgetsTheOldestFirst) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  constexpr size_t kGhosts = 20;
  GhostTable table(kGhosts);
  std::vector<std::pair<uint8_t, uint64_t>> model;  // key and bytes
  for (uint64_t step = 1; step <= 5000; ++step) {
    const auto key = static_cast<uint8_t>(random() % 50);
    std::erase_if(model, [&](const auto& item) { return item.first == key; });
    if (random() % 4 == 0) {
      table.Forget(1, MakeKey(key));
    } else {
      table.Remember(1, MakeKey(key), {.reason = MissReason::kEvicted, .bytes = step});
      if (model.size() == kGhosts) model.erase(model.begin());
      model.emplace_back(key, step);
    }
    ASSERT_EQ(table.size(1), model.size());
    for (uint8_t any = 0; any < 50; ++any) {
      const auto expected = std::ranges::find(model, any, [](const auto& item) { return item.first; });
      const Ghost* ghost = table.Find(1, MakeKey(any));
      ASSERT_EQ(ghost != nullptr, expected != model.end()) << "step " << step << " key " << int{any};
      if (ghost != nullptr) {
        ASSERT_EQ(ghost->bytes, expected->second);
      }
    }
  }
}

}  // namespace
}  // namespace ashlar::storage
