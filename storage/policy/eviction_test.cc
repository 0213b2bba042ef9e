#include "storage/policy/eviction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

bool Always(ObjectId) {
  return true;
}

TEST(LruPolicy, OffersTheLeastRecentlyUsedFirst) {
  LruPolicy lru;
  for (ObjectId id = 1; id <= 4; ++id) lru.Track(9, id, 2);
  lru.Touch(1);
  lru.Touch(3);
  EXPECT_THAT(lru.Victims(9, 8, Always), ElementsAre(2, 4, 1, 3));
  EXPECT_THAT(lru.Victims(9, 8, Always), ElementsAre(2, 4, 1, 3)) << "offering changes nothing";
}

TEST(LruPolicy, OffersJustEnough) {
  LruPolicy lru;
  lru.Track(9, 1, 3);
  lru.Track(9, 2, 3);
  lru.Track(9, 3, 3);
  EXPECT_THAT(lru.Victims(9, 3, Always), ElementsAre(1));
  EXPECT_THAT(lru.Victims(9, 4, Always), ElementsAre(1, 2));
  EXPECT_THAT(lru.Victims(9, 100, Always), ElementsAre(1, 2, 3));
}

TEST(LruPolicy, KnowsTenantsApart) {
  LruPolicy lru;
  lru.Track(1, 1, 1);
  lru.Track(2, 2, 1);
  EXPECT_THAT(lru.Victims(2, 5, Always), ElementsAre(2));
  EXPECT_THAT(lru.Victims(3, 5, Always), IsEmpty());
}

TEST(LruPolicy, SkipsObjectsInUseAndCountsThemAsRecent) {
  LruPolicy lru;
  for (ObjectId id = 1; id <= 4; ++id) lru.Track(9, id, 1);
  const std::set<ObjectId> in_use = {1, 3};
  const auto idle = [&](ObjectId id) { return !in_use.contains(id); };
  EXPECT_THAT(lru.Victims(9, 1, idle), ElementsAre(2));
  EXPECT_THAT(lru.Victims(9, 9, idle), ElementsAre(2, 4));
  EXPECT_THAT(lru.Victims(9, 2, Always), ElementsAre(2, 4)) << "older than any that is in use";
  lru.Touch(1);  // released
  lru.Touch(3);
  EXPECT_THAT(lru.Victims(9, 9, Always), ElementsAre(2, 4, 1, 3));
}

TEST(LruPolicy, ForgetsForGood) {
  LruPolicy lru;
  for (ObjectId id = 1; id <= 3; ++id) lru.Track(9, id, 1);
  lru.Forget(2);
  EXPECT_THAT(lru.Victims(9, 9, Always), ElementsAre(1, 3));
}

}  // namespace
}  // namespace ashlar::storage
