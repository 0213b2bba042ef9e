#include "storage/policy/eviction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Group kGroup{9};

bool Always(ObjectId) {
  return true;
}

std::vector<ObjectId> Victims(LruPolicy& lru, const Group& group, uint64_t extents,
                              absl::FunctionRef<bool(ObjectId)> idle) {
  const EvictionPolicy::Allowance all{group, UINT64_MAX};
  return lru.Victims({&all, 1}, extents, idle);
}

TEST(LruPolicy, OffersTheLeastRecentlyUsedFirst) {
  LruPolicy lru;
  for (ObjectId id = 1; id <= 4; ++id) lru.Track(kGroup, id, 2);
  lru.Touch(1);
  lru.Touch(3);
  EXPECT_THAT(Victims(lru, kGroup, 8, Always), ElementsAre(2, 4, 1, 3));
  EXPECT_THAT(Victims(lru, kGroup, 8, Always), ElementsAre(2, 4, 1, 3)) << "offering changes nothing";
}

TEST(LruPolicy, OffersJustEnough) {
  LruPolicy lru;
  lru.Track(kGroup, 1, 3);
  lru.Track(kGroup, 2, 3);
  lru.Track(kGroup, 3, 3);
  EXPECT_THAT(Victims(lru, kGroup, 3, Always), ElementsAre(1));
  EXPECT_THAT(Victims(lru, kGroup, 4, Always), ElementsAre(1, 2));
  EXPECT_THAT(Victims(lru, kGroup, 9, Always), ElementsAre(1, 2, 3));
  EXPECT_THAT(Victims(lru, kGroup, 10, Always), IsEmpty()) << "nobody goes in vain";
}

TEST(LruPolicy, KnowsTenantsApart) {
  LruPolicy lru;
  lru.Track({1}, 1, 1);
  lru.Track({2}, 2, 1);
  EXPECT_THAT(Victims(lru, {2}, 1, Always), ElementsAre(2));
  EXPECT_THAT(Victims(lru, {3}, 1, Always), IsEmpty());
}

TEST(LruPolicy, SkipsObjectsInUseAndCountsThemAsRecent) {
  LruPolicy lru;
  for (ObjectId id = 1; id <= 4; ++id) lru.Track(kGroup, id, 1);
  const std::set<ObjectId> in_use = {1, 3};
  const auto idle = [&](ObjectId id) { return !in_use.contains(id); };
  EXPECT_THAT(Victims(lru, kGroup, 1, idle), ElementsAre(2));
  EXPECT_THAT(Victims(lru, kGroup, 2, idle), ElementsAre(2, 4));
  EXPECT_THAT(Victims(lru, kGroup, 2, Always), ElementsAre(2, 4)) << "older than any that is in use";
  lru.Touch(1);  // released
  lru.Touch(3);
  EXPECT_THAT(Victims(lru, kGroup, 4, Always), ElementsAre(2, 4, 1, 3));
}

TEST(LruPolicy, ComparesPoolsByAgeAndTakesFromNoneMoreThanIsAllowed) {
  LruPolicy lru;
  const Group open{9, PoolKind::kPublic}, own{9, PoolKind::kPrivate};
  for (ObjectId id = 1; id <= 6; ++id) lru.Track(id % 2 == 0 ? own : open, id, 2);
  const auto victims = [&](uint64_t of_open, uint64_t of_own) {
    const EvictionPolicy::Allowance allowed[] = {{open, of_open}, {own, of_own}};
    return lru.Victims(allowed, 8, Always);
  };
  EXPECT_THAT(victims(99, 99), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(victims(3, 99), ElementsAre(1, 2, 4, 6)) << "a second one of the first pool would be too many";
  EXPECT_THAT(victims(3, 2), IsEmpty()) << "not enough may go";
  EXPECT_THAT(victims(0, 99), IsEmpty());
}

TEST(LruPolicy, ForgetsForGood) {
  LruPolicy lru;
  for (ObjectId id = 1; id <= 3; ++id) lru.Track(kGroup, id, 1);
  lru.Forget(2);
  EXPECT_THAT(Victims(lru, kGroup, 2, Always), ElementsAre(1, 3));
}

}  // namespace
}  // namespace ashlar::storage
