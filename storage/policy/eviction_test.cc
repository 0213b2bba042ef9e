// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/eviction.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <initializer_list>
#include <map>
#include <memory>
#include <vector>

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr TenantPool kPool{9};

struct Cached {
  RankedObject object;
  Rank copy;
};

std::unique_ptr<EvictionPolicy> Make(EvictionMode mode, const ReuseModels& models, const PromotionCosts& costs) {
  if (mode == EvictionMode::kPrice) return std::make_unique<PricePolicy>(models, costs);
  return std::make_unique<LruPolicy>();
}

// In either mode, copies of equal worth and equal use are evicted by recency.
class EvictionPolicyTest : public ::testing::TestWithParam<EvictionMode> {
 protected:
  EvictionPolicyTest() {
    for (ObjectId id = 0; id < objects_.size(); ++id) {
      objects_[id].object.id = id;
      Copy(id).object = &objects_[id].object;
      Copy(id).idle = true;
    }
  }

  Rank& Copy(ObjectId id) { return objects_.at(id).copy; }
  void Track(const TenantPool& pool, ObjectId id, uint32_t extents) {
    Copy(id).extents = extents;
    Copy(id).object->pool = pool;
    policy_->Track(pool, Copy(id));
  }
  void SetIdle(std::initializer_list<ObjectId> ids, bool idle) {
    for (const ObjectId id : ids) Copy(id).idle = idle;
  }
  std::vector<ObjectId> Victims(std::vector<EvictionPolicy::Allowance> pools, uint64_t extents) {
    std::vector<ObjectId> ids;
    for (const RankedObject* victim : policy_->Victims(pools, extents)) ids.push_back(victim->id);
    return ids;
  }
  std::vector<ObjectId> Victims(const TenantPool& pool, uint64_t extents) {
    return Victims({{pool, UINT64_MAX}}, extents);
  }

  std::array<Cached, 7> objects_;
  ReuseModels models_;
  const PromotionCosts costs_;
  const std::unique_ptr<EvictionPolicy> policy_ = Make(GetParam(), models_, costs_);
};

INSTANTIATE_TEST_SUITE_P(All, EvictionPolicyTest, ::testing::Values(EvictionMode::kPrice, EvictionMode::kLru),
                         [](const auto& instance) { return instance.param == EvictionMode::kPrice ? "Price" : "Lru"; });

TEST_P(EvictionPolicyTest, ReturnsLeastRecentlyUsedFirst) {
  for (ObjectId id = 1; id <= 4; ++id) Track(kPool, id, 2);
  policy_->Touch(Copy(1));
  policy_->Touch(Copy(3));
  EXPECT_THAT(Victims(kPool, 8), ElementsAre(2, 4, 1, 3));
  EXPECT_THAT(Victims(kPool, 8), ElementsAre(2, 4, 1, 3)) << "offering changes nothing";
}

TEST_P(EvictionPolicyTest, ReturnsMinimalVictims) {
  for (ObjectId id = 1; id <= 3; ++id) Track(kPool, id, 3);
  EXPECT_THAT(Victims(kPool, 3), ElementsAre(1));
  EXPECT_THAT(Victims(kPool, 4), ElementsAre(1, 2));
  EXPECT_THAT(Victims(kPool, 9), ElementsAre(1, 2, 3));
  EXPECT_THAT(Victims(kPool, 10), IsEmpty()) << "no object is evicted if the space does not suffice";
}

TEST_P(EvictionPolicyTest, SeparatesTenants) {
  Track({1}, 1, 1);
  Track({2}, 2, 1);
  EXPECT_THAT(Victims(TenantPool{2}, 1), ElementsAre(2));
  EXPECT_THAT(Victims(TenantPool{3}, 1), IsEmpty());
}

TEST_P(EvictionPolicyTest, SkipsObjectsInUseAndCountsThemAsRecent) {
  for (ObjectId id = 1; id <= 4; ++id) Track(kPool, id, 1);
  SetIdle({1, 3}, false);
  EXPECT_THAT(Victims(kPool, 1), ElementsAre(2));
  EXPECT_THAT(Victims(kPool, 2), ElementsAre(2, 4));
  EXPECT_THAT(Victims(kPool, 3), IsEmpty());
  SetIdle({1, 3}, true);
  EXPECT_THAT(Victims(kPool, 2), ElementsAre(2, 4)) << "older than any that is in use";
  policy_->Touch(Copy(1));  // released
  policy_->Touch(Copy(3));
  EXPECT_THAT(Victims(kPool, 4), ElementsAre(2, 4, 1, 3));
}

TEST_P(EvictionPolicyTest, NoVictimsIfAllInUse) {
  for (ObjectId id = 1; id <= 3; ++id) Track(kPool, id, 1);
  SetIdle({1, 2, 3}, false);
  EXPECT_THAT(Victims(kPool, 1), IsEmpty());
  SetIdle({1, 2, 3}, true);
  EXPECT_THAT(Victims(kPool, 3), ElementsAre(1, 2, 3)) << "all have been met, in their order";
}

TEST_P(EvictionPolicyTest, ComparesPoolsByAgeWithinTheirLimits) {
  const TenantPool open{9, PoolKind::kPublic}, own{9, PoolKind::kPrivate};
  for (ObjectId id = 1; id <= 6; ++id) Track(id % 2 == 0 ? own : open, id, 2);
  const auto victims = [&](uint64_t of_open, uint64_t of_own) { return Victims({{open, of_open}, {own, of_own}}, 8); };
  EXPECT_THAT(victims(99, 99), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(victims(3, 99), ElementsAre(1, 2, 4, 6)) << "a second one of the first pool would be too many";
  EXPECT_THAT(victims(3, 2), IsEmpty()) << "not enough may go";
  EXPECT_THAT(victims(0, 99), IsEmpty());
}

TEST_P(EvictionPolicyTest, EvictsDirtyCopiesLast) {
  for (ObjectId id = 1; id <= 4; ++id) Track(kPool, id, 2);
  Copy(1).dirty = Copy(3).dirty = true;
  EXPECT_THAT(Victims(kPool, 4), ElementsAre(2, 4));
  EXPECT_THAT(Victims(kPool, 6), ElementsAre(2, 4, 1)) << "rather than none";
  EXPECT_THAT(Victims(kPool, 9), IsEmpty());
  const EvictionPolicy::Allowance all{kPool, UINT64_MAX};
  std::vector<ObjectId> next;
  for (const RankedObject* object : policy_->Victims({&all, 1}, 9, EvictionPolicy::Purpose::kInspect)) {
    next.push_back(object->id);
  }
  EXPECT_THAT(next, ElementsAre(1, 2, 3, 4)) << "in their order, and fewer than requested";
}

// Otherwise an eviction from a memory full of dirty copies would visit all of them.
TEST_P(EvictionPolicyTest, BoundsTheSearchForCleanCopies) {
  std::vector<Cached> many(1100);
  for (ObjectId id = 0; id < many.size(); ++id) {
    many[id].object.id = id;
    many[id].object.pool = kPool;
    many[id].copy.object = &many[id].object;
    many[id].copy.extents = 1;
    many[id].copy.idle = true;
    many[id].copy.dirty = id + 1 < many.size();
    policy_->Track(kPool, many[id].copy);
  }
  EXPECT_THAT(Victims(kPool, 2), ElementsAre(0, 1));
  many[1000].copy.dirty = false;
  EXPECT_THAT(Victims(kPool, 1), ElementsAre(1000));
}

TEST_P(EvictionPolicyTest, DirtyCopiesThatMustStayHideNoOthers) {
  const TenantPool other{9, PoolKind::kPrivate};
  std::vector<Cached> many(1100);
  for (Cached& cached : many) {
    cached.object.id = 10;
    cached.object.pool = other;
    cached.copy = {.object = &cached.object, .extents = 1, .idle = true, .dirty = true};
    policy_->Track(other, cached.copy);
  }
  for (ObjectId id = 1; id <= 3; ++id) Track(kPool, id, 2);
  EXPECT_THAT(Victims({{kPool, 99}, {other, 1}}, 5), ElementsAre(10, 1, 2));
}

TEST_P(EvictionPolicyTest, ErasesForGood) {
  for (ObjectId id = 1; id <= 3; ++id) Track(kPool, id, 1);
  policy_->Erase(Copy(2));
  EXPECT_THAT(Victims(kPool, 2), ElementsAre(1, 3));
  EXPECT_FALSE(Copy(2).tracked());
}

class PricePolicyTest : public ::testing::Test {
 protected:
  // Objects of one extent, each with a different key.
  void Add(ObjectId id, ReuseKind kind, float saves_a_byte) {
    auto& [object, copy] = objects_[id];
    object = {.id = id, .pool = kPool, .reuse = {.kind = kind, .saves_a_byte = saves_a_byte}};
    copy.object = &object;
    copy.extents = 1;
    copy.idle = true;
    models_.Tick(kPool.tenant);
    models_.Came(kPool.tenant, object.reuse, nullptr);
    policy_.Track(kPool, copy);
  }
  void Use(ObjectId id) {
    models_.Tick(kPool.tenant);
    models_.Used(kPool.tenant, objects_[id].object.reuse);
    policy_.Touch(objects_[id].copy);
  }
  std::vector<ObjectId> Victims(uint64_t extents) {
    const EvictionPolicy::Allowance all{kPool, UINT64_MAX};
    std::vector<ObjectId> ids;
    for (const RankedObject* victim : policy_.Victims({&all, 1}, extents, EvictionPolicy::Purpose::kEvict))
      ids.push_back(victim->id);
    return ids;
  }
  // Segments are used after eight requests, over and over; checkpoints never.
  void Teach() {
    Reuse used{.kind = ReuseKind::kSegment}, never{.kind = ReuseKind::kCheckpoint};
    for (int i = 0; i < 300; ++i) {
      for (int request = 0; request < 8; ++request) models_.Tick(kPool.tenant);
      models_.Used(kPool.tenant, used);
      models_.GivenUp(kPool.tenant, never);
    }
  }

  // Loading a byte from the tier takes as long as computing that many FLOPs.
  void Measure(TierKind tier, double flops_a_byte) {
    PromotionCost& cost = costs_[kPool.tenant];
    constexpr uint64_t kBytes = 1 << 20;
    cost.Computed(1e6, 1000);
    cost.Promoted(tier, kBytes, now_, now_ + static_cast<Nanos>(kBytes * flops_a_byte / 1000));
    now_ += Nanos{1} << 30;
  }

  std::map<ObjectId, Cached> objects_;
  ReuseModels models_;
  PromotionCosts costs_;
  PricePolicy policy_{models_, costs_};
  Nanos now_ = 0;
};

TEST_F(PricePolicyTest, EvictsCheaplyLoadedFirst) {
  Measure(TierKind::kSsd, 10);
  Add(1, ReuseKind::kSegment, 10'000);
  Add(2, ReuseKind::kSegment, 100);
  Add(3, ReuseKind::kSegment, 1);
  policy_.SetLower(objects_[1].copy, TierKind::kSsd);
  policy_.SetLower(objects_[3].copy, TierKind::kSsd);
  EXPECT_THAT(Victims(3), ElementsAre(3, 1, 2)) << "computing 3 is cheaper than loading it";
}

TEST_F(PricePolicyTest, EvictsByFlopsWhileTheLowerTierIsSlowOrNotMeasured) {
  Add(1, ReuseKind::kSegment, 10'000);
  Add(2, ReuseKind::kSegment, 100);
  policy_.SetLower(objects_[1].copy, TierKind::kSsd);
  EXPECT_THAT(Victims(2), ElementsAre(2, 1)) << "not measured";
  Measure(TierKind::kSsd, 5'000);
  policy_.SetLower(objects_[1].copy, TierKind::kNone);
  policy_.SetLower(objects_[1].copy, TierKind::kSsd);
  EXPECT_THAT(Victims(2), ElementsAre(2, 1)) << "slow";
  costs_.erase(kPool.tenant);
  Measure(TierKind::kSsd, 10);
  policy_.SetLower(objects_[1].copy, TierKind::kNone);
  policy_.SetLower(objects_[1].copy, TierKind::kSsd);
  EXPECT_THAT(Victims(2), ElementsAre(1, 2)) << "fast";
}

TEST_F(PricePolicyTest, LossOfTheLowerCopyRaisesThePrice) {
  Measure(TierKind::kSsd, 10);
  Add(1, ReuseKind::kSegment, 10'000);
  policy_.SetLower(objects_[1].copy, TierKind::kSsd);
  Add(2, ReuseKind::kSegment, 100);
  EXPECT_THAT(Victims(2), ElementsAre(1, 2));
  policy_.SetLower(objects_[1].copy, TierKind::kNone);
  EXPECT_THAT(Victims(2), ElementsAre(2, 1));
}

TEST_F(PricePolicyTest, MovedCopiesKeepTheirOrder) {
  Measure(TierKind::kSsd, 10);
  for (ObjectId id = 1; id <= 9; ++id) Add(id, ReuseKind::kSegment, 1000);
  for (const ObjectId id : {4u, 9u, 1u, 6u, 2u, 8u, 3u, 7u}) policy_.SetLower(objects_[id].copy, TierKind::kSsd);
  EXPECT_THAT(Victims(9), ElementsAre(1, 2, 3, 4, 6, 7, 8, 9, 5));
  for (const ObjectId id : {8u, 1u, 3u, 2u}) policy_.SetLower(objects_[id].copy, TierKind::kNone);
  EXPECT_THAT(Victims(9), ElementsAre(4, 6, 7, 9, 1, 2, 3, 5, 8));
}

TEST_F(PricePolicyTest, EvictsLowestSavingPerByteFirst) {
  Add(1, ReuseKind::kSegment, 100);
  Add(2, ReuseKind::kSegment, 1);
  Add(3, ReuseKind::kSegment, 10'000);
  EXPECT_THAT(Victims(3), ElementsAre(2, 1, 3)) << "though the first one is the oldest";
}

TEST_F(PricePolicyTest, EvictsLeastLikelyReusedFirst) {
  Teach();
  Add(1, ReuseKind::kSegment, 1);
  Add(2, ReuseKind::kCheckpoint, 1);
  Add(3, ReuseKind::kCheckpoint, 1);
  EXPECT_THAT(Victims(3), ElementsAre(2, 3, 1));
}

TEST_F(PricePolicyTest, WeighsValueAgainstLikelihood) {
  Teach();
  Add(1, ReuseKind::kSegment, 1);
  Add(2, ReuseKind::kCheckpoint, 2);
  Add(3, ReuseKind::kCheckpoint, 1e8);
  EXPECT_THAT(Victims(3), ElementsAre(2, 1, 3));
}

TEST_F(PricePolicyTest, RanksEquallyUsedTogether) {
  Teach();
  Add(1, ReuseKind::kSegment, 1);
  Add(2, ReuseKind::kSegment, 1);
  for (int i = 0; i < 5; ++i) Use(1);
  // any object that is ever used again would have been used by now
  for (int i = 0; i < 10'000; ++i) models_.Tick(kPool.tenant);
  Add(3, ReuseKind::kSegment, 1);
  EXPECT_EQ(Victims(3).back(), 3u);
}

TEST_F(PricePolicyTest, IsPerTenant) {
  Teach();
  const ReuseModel::Class segment = ReuseModels::ClassOf({.kind = ReuseKind::kSegment});
  const double known = models_.Rate(kPool.tenant, segment, models_.now(kPool.tenant));
  EXPECT_GT(known, 2 * models_.Rate(kPool.tenant + 1, segment, 0));
}

}  // namespace
}  // namespace ashlar::storage
