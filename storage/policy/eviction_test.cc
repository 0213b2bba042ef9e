#include "storage/policy/eviction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <initializer_list>
#include <vector>

#include "storage/entry.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Group kGroup{9};

class LruPolicyTest : public ::testing::Test {
 protected:
  LruPolicyTest() {
    for (ObjectId id = 0; id < entries_.size(); ++id) {
      entries_[id].id = id;
      Copy(id).entry = &entries_[id];
      Copy(id).idle = true;
    }
  }

  Rank& Copy(ObjectId id) { return entries_.at(id).top().rank; }
  void Track(const Group& group, ObjectId id, uint32_t extents) {
    Copy(id).extents = extents;
    lru_.Track(group, Copy(id));
  }
  void SetIdle(std::initializer_list<ObjectId> ids, bool idle) {
    for (const ObjectId id : ids) Copy(id).idle = idle;
  }
  std::vector<ObjectId> Victims(std::vector<EvictionPolicy::Allowance> groups, uint64_t extents) {
    std::vector<ObjectId> ids;
    for (const Entry* victim : lru_.Victims(groups, extents)) ids.push_back(victim->id);
    return ids;
  }
  std::vector<ObjectId> Victims(const Group& group, uint64_t extents) {
    return Victims({{group, UINT64_MAX}}, extents);
  }

  std::array<Entry, 7> entries_;
  LruPolicy lru_;
};

TEST_F(LruPolicyTest, OffersTheLeastRecentlyUsedFirst) {
  for (ObjectId id = 1; id <= 4; ++id) Track(kGroup, id, 2);
  lru_.Touch(Copy(1));
  lru_.Touch(Copy(3));
  EXPECT_THAT(Victims(kGroup, 8), ElementsAre(2, 4, 1, 3));
  EXPECT_THAT(Victims(kGroup, 8), ElementsAre(2, 4, 1, 3)) << "offering changes nothing";
}

TEST_F(LruPolicyTest, OffersJustEnough) {
  for (ObjectId id = 1; id <= 3; ++id) Track(kGroup, id, 3);
  EXPECT_THAT(Victims(kGroup, 3), ElementsAre(1));
  EXPECT_THAT(Victims(kGroup, 4), ElementsAre(1, 2));
  EXPECT_THAT(Victims(kGroup, 9), ElementsAre(1, 2, 3));
  EXPECT_THAT(Victims(kGroup, 10), IsEmpty()) << "nobody goes in vain";
}

TEST_F(LruPolicyTest, KnowsTenantsApart) {
  Track({1}, 1, 1);
  Track({2}, 2, 1);
  EXPECT_THAT(Victims(Group{2}, 1), ElementsAre(2));
  EXPECT_THAT(Victims(Group{3}, 1), IsEmpty());
}

TEST_F(LruPolicyTest, SkipsObjectsInUseAndCountsThemAsRecent) {
  for (ObjectId id = 1; id <= 4; ++id) Track(kGroup, id, 1);
  SetIdle({1, 3}, false);
  EXPECT_THAT(Victims(kGroup, 1), ElementsAre(2));
  EXPECT_THAT(Victims(kGroup, 2), ElementsAre(2, 4));
  EXPECT_THAT(Victims(kGroup, 3), IsEmpty());
  SetIdle({1, 3}, true);
  EXPECT_THAT(Victims(kGroup, 2), ElementsAre(2, 4)) << "older than any that is in use";
  lru_.Touch(Copy(1));  // released
  lru_.Touch(Copy(3));
  EXPECT_THAT(Victims(kGroup, 4), ElementsAre(2, 4, 1, 3));
}

TEST_F(LruPolicyTest, OffersNothingWhereAllAreInUse) {
  for (ObjectId id = 1; id <= 3; ++id) Track(kGroup, id, 1);
  SetIdle({1, 2, 3}, false);
  EXPECT_THAT(Victims(kGroup, 1), IsEmpty());
  SetIdle({1, 2, 3}, true);
  EXPECT_THAT(Victims(kGroup, 3), ElementsAre(1, 2, 3)) << "all have been met, in their order";
}

TEST_F(LruPolicyTest, ComparesPoolsByAgeAndTakesFromNoneMoreThanIsAllowed) {
  const Group open{9, PoolKind::kPublic}, own{9, PoolKind::kPrivate};
  for (ObjectId id = 1; id <= 6; ++id) Track(id % 2 == 0 ? own : open, id, 2);
  const auto victims = [&](uint64_t of_open, uint64_t of_own) { return Victims({{open, of_open}, {own, of_own}}, 8); };
  EXPECT_THAT(victims(99, 99), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(victims(3, 99), ElementsAre(1, 2, 4, 6)) << "a second one of the first pool would be too many";
  EXPECT_THAT(victims(3, 2), IsEmpty()) << "not enough may go";
  EXPECT_THAT(victims(0, 99), IsEmpty());
}

TEST_F(LruPolicyTest, ForgetsForGood) {
  for (ObjectId id = 1; id <= 3; ++id) Track(kGroup, id, 1);
  lru_.Forget(Copy(2));
  EXPECT_THAT(Victims(kGroup, 2), ElementsAre(1, 3));
  EXPECT_FALSE(Copy(2).tracked());
}

}  // namespace
}  // namespace ashlar::storage
