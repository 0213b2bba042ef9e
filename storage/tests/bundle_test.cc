// SPDX-License-Identifier: Apache-2.0
// Tensor-parallel shards of one key: they hit, are leased and are evicted together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "storage/testing/tiered_rig.h"

namespace ashlar::storage {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
constexpr SessionId kRank0 = 10, kRank1 = 11, kSecondEngine = 20;

// The shard of a text for `rank` of two: 3 extents, with bytes of its own seed.
ObjectHeader ShareOf(uint64_t text, uint32_t rank) {
  ObjectHeader plan = TestPlan(text, 64);
  plan.shard = {.rank = rank, .size = 2};
  return plan;
}
uint64_t Content(uint64_t text, uint32_t rank) {
  return text + 100 * rank;
}

class BundleTest : public ::testing::Test {
 protected:
  void Make(const TieredOptions& options) {
    rig_ = std::make_unique<TieredRig>(options);
    Open();
  }
  void Open() {
    for (const SessionId session : {kRank0, kRank1}) cache().OpenSession(session, 1);
    cache().OpenSession(kSecondEngine, 2);
  }
  ~BundleTest() override {
    if (rig_ == nullptr) return;
    for (const SessionId session : {kRank0, kRank1, kSecondEngine}) cache().CloseSession(session, [] {});
    rig_->Settle();
    const Cache::Stats left = cache().stats();
    EXPECT_EQ(left.leases + left.reservations + left.landings + left.copies_under_way, 0u);
  }
  Cache& cache() { return *rig_->cache; }
  static SessionId Session(uint32_t rank) { return rank == 0 ? kRank0 : kRank1; }

  void Publish(uint64_t text, uint32_t rank) {
    ASSERT_TRUE(rig_->Publish(Session(rank), ShareOf(text, rank), Content(text, rank)));
    rig_->Settle();
  }
  void PublishBoth(uint64_t text) {
    Publish(text, 0);
    Publish(text, 1);
  }
  Match Lookup(uint64_t text, uint32_t rank) { return rig_->Lookup(Session(rank), ShareOf(text, rank)); }
  MissReason Reason(uint64_t text, uint32_t rank) {
    const Match match = Lookup(text, rank);
    rig_->Settle();
    cache().Release(Session(rank), match.lease);
    return match.found[0].reason;
  }
  std::vector<MissReason> Reasons(uint64_t text) { return {Reason(text, 0), Reason(text, 1)}; }
  // Lands what a rank's lease holds, and compares every byte.
  MissReason Land(uint64_t text, uint32_t rank, const LeaseId& lease) {
    const TestPages pages(16);
    const auto landing = rig_->StartLanding(Session(rank), ++landings_, lease, TestTarget(pages, {{0, 100}}));
    rig_->Settle();
    const MissReason verdict = landing->verdict.value()[0];
    if (verdict == MissReason::kNone) {
      EXPECT_LT(LandingError(pages, ShareOf(text, rank), Content(text, rank), 100), 1e-5);
    }
    return verdict;
  }

  std::unique_ptr<TieredRig> rig_;
  LandingId landings_ = 0;
};

TEST_F(BundleTest, HitsWhenEveryShardIsThere) {
  Make({.hbm = 0, .dram = 32});
  EXPECT_EQ(Reason(1, 0), MissReason::kNeverSeen);
  Publish(1, 0);
  EXPECT_THAT(Reasons(1), Each(MissReason::kBeingPublished));
  Publish(1, 1);
  for (const uint32_t rank : {0u, 1u}) {
    const Match match = Lookup(1, rank);
    ASSERT_EQ(match.found[0].reason, MissReason::kNone);
    EXPECT_EQ(match.found[0].header->shard, (TensorShard{.rank = rank, .size = 2}));
    EXPECT_EQ(Land(1, rank, match.lease), MissReason::kNone);
    cache().Release(Session(rank), match.lease);
  }
  // Lookups of the whole model, of another division, and of another tenant do not find it.
  EXPECT_EQ(rig_->Lookup(kRank0, TestPlan(1, 64)).found[0].reason, MissReason::kNeverSeen);
  ObjectHeader of_four = ShareOf(1, 0);
  of_four.shard.size = 4;
  EXPECT_EQ(rig_->Lookup(kRank0, of_four).found[0].reason, MissReason::kNeverSeen);
  EXPECT_EQ(rig_->Lookup(kSecondEngine, ShareOf(1, 0)).found[0].reason, MissReason::kNeverSeen);
}

TEST_F(BundleTest, RanksAttachToLookupOfOneRank) {
  Make({.hbm = 0, .dram = 32});
  PublishBoth(1);
  const Match first = Lookup(1, 0);
  const absl::StatusOr<Match> second = cache().Attach(kRank1, first.lease, TensorShard{.rank = 1, .size = 2});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_NE(second->lease, first.lease);
  ASSERT_EQ(second->found[0].reason, MissReason::kNone);
  EXPECT_EQ(second->found[0].header->shard.rank, 1u);
  cache().Release(kRank0, first.lease);
  // The second lease covers the whole bundle.
  EXPECT_TRUE(cache().Reserve(kRank0, ShareOf(1, 0)).outcome == ReserveOutcome::kAlreadyPresent);
  EXPECT_EQ(Land(1, 1, second->lease), MissReason::kNone);  // a use: now it has no deadline
  rig_->clock.Advance(int64_t{1} << 50);
  cache().Tick();
  ASSERT_TRUE(cache().Held(kRank1, second->lease).ok());
  EXPECT_EQ(cache().Attach(kSecondEngine, second->lease, TensorShard{.rank = 0, .size = 2}).status().code(),
            absl::StatusCode::kNotFound);
  const absl::StatusOr<Match> strange = cache().Attach(kRank0, second->lease, TensorShard{.rank = 2, .size = 4});
  ASSERT_TRUE(strange.ok());
  EXPECT_EQ(strange->found[0].reason, MissReason::kInvalidRequest);
}

TEST_F(BundleTest, AnAttachedLeaseThatIsNeverUsedEnds) {
  Make({.hbm = 0, .dram = 32});
  PublishBoth(1);
  const Match first = Lookup(1, 0);
  ASSERT_TRUE(cache().Attach(kRank1, first.lease, TensorShard{.rank = 1, .size = 2}).ok());
  EXPECT_EQ(cache().stats().leases, 2u);
  rig_->clock.Advance(int64_t{1} << 50);
  cache().Tick();
  EXPECT_EQ(cache().stats().leases, 1u);  // the first one was used, by attaching to it
}

TEST_F(BundleTest, ALeaseOfAnotherShardCountHoldsNothing) {
  Make({.hbm = 0, .dram = 32});
  PublishBoth(1);
  ASSERT_TRUE(rig_->Publish(kRank0, TestPlan(1, 64), 1));
  ASSERT_TRUE(rig_->Publish(kRank0, TestPlan(2, 64), 2));
  rig_->Settle();
  rig_->Restart();  // now only the disk has them
  Open();
  const Match of_two = Lookup(1, 0);
  const auto whole = cache().Attach(kRank0, of_two.lease, TensorShard{});
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->found[0].reason, MissReason::kInvalidRequest);
  const Match of_one = rig_->Lookup(kRank0, TestPlan(1, 64));
  const auto shard = cache().Attach(kRank0, of_one.lease, TensorShard{.rank = 1, .size = 2});
  ASSERT_TRUE(shard.ok());
  EXPECT_EQ(shard->found[0].reason, MissReason::kInvalidRequest);
  EXPECT_EQ(Land(1, 0, shard->lease), MissReason::kInvalidRequest);
  rig_->Settle();
}

TEST_F(BundleTest, IsPricedAsOne) {
  Make({.hbm = 0, .dram = 32, .ssd = 0});
  PublishBoth(1);
  const Match slow = Lookup(1, 0);
  const TestPages pages(16);
  const auto landing = rig_->StartLanding(kRank0, ++landings_, slow.lease, TestTarget(pages, {{0, 100}}));
  rig_->clock.Advance(1'000'000);  // landings are slow from now on
  rig_->Settle();
  cache().Release(kRank0, slow.lease);
  int hits = 0;
  for (int i = 0; i < 32; ++i) {
    const ObjectHeader plan = ShareOf(1, i % 2);
    const Query query{.kind = plan.kind, .key = plan.key, .shard = plan.shard, .tokens = plan.tokens, .recompute = 1};
    const Match match = cache().Lookup(Session(i % 2), {&query, 1});
    hits += match.found[0].reason == MissReason::kNone;
    cache().Release(Session(i % 2), match.lease);
  }
  EXPECT_EQ(hits, 2);  // one of sixteen bundles
  // A rank is not declined if another rank has begun its bundle.
  ObjectHeader first = ShareOf(2, 0), second = ShareOf(2, 1);
  ASSERT_TRUE(rig_->Publish(kRank0, first, Content(2, 0)));
  EXPECT_EQ(cache().Reserve(kRank1, second, {}, PoolKind::kPublic, /*recompute=*/1).outcome, ReserveOutcome::kGranted);
}

TEST_F(BundleTest, ALeaseOfOneShardKeepsAll) {
  Make({.hbm = 0, .dram = 9, .ssd = 0});
  PublishBoth(1);
  const Match match = Lookup(1, 1);
  const Cache::Reservation other = cache().Reserve(kRank0, ShareOf(2, 0));
  EXPECT_EQ(other.outcome, ReserveOutcome::kGranted);
  EXPECT_EQ(cache().Reserve(kRank1, ShareOf(2, 1)).outcome, ReserveOutcome::kNoSpace);
  cache().Abandon(kRank0, other.id);
  EXPECT_EQ(Land(1, 1, match.lease), MissReason::kNone);
  cache().Release(kRank1, match.lease);
  EXPECT_THAT(Reasons(1), Each(MissReason::kNone));
}

TEST_F(BundleTest, ShardsAreEvictedAsOne) {
  Make({.hbm = 0, .dram = 9, .ssd = 0});
  PublishBoth(1);
  PublishBoth(2);  // makes space by one shard; the other shard is then useless
  EXPECT_THAT(Reasons(2), Each(MissReason::kNone));
  EXPECT_THAT(Reasons(1), Each(MissReason::kEvicted));
  EXPECT_THAT(rig_->observer.evicted, ElementsAre(MissReason::kEvicted, MissReason::kEvicted));
  EXPECT_EQ(cache().stats().objects, 2u);
  EXPECT_EQ(rig_->dram->Usage(1).used_bytes, 6 * limits::kExtentBytes);
}

TEST_F(BundleTest, OperatorsActOnAllShards) {
  Make({.hbm = 0, .dram = 9, .ssd = 0});
  PublishBoth(1);
  const Key& key = ShareOf(1, 0).key;
  EXPECT_TRUE(cache().retention().Pin(1, key, 0));
  const Cache::Reservation other = cache().Reserve(kRank0, ShareOf(2, 0));
  EXPECT_EQ(other.outcome, ReserveOutcome::kGranted);
  EXPECT_EQ(cache().Reserve(kRank1, ShareOf(2, 1)).outcome, ReserveOutcome::kNoSpace);
  cache().Abandon(kRank0, other.id);
  EXPECT_TRUE(cache().retention().Unpin(1, key));
  EXPECT_FALSE(cache().retention().Unpin(1, key));
  EXPECT_EQ(cache().stats().objects, 2u);
  EXPECT_TRUE(cache().retention().Evict(1, key));
  EXPECT_THAT(Reasons(1), Each(MissReason::kEvicted));
  EXPECT_FALSE(cache().retention().Evict(1, key));
}

TEST_F(BundleTest, APinHoldsForShardsThatComeLater) {
  Make({.hbm = 0, .dram = 7, .ssd = 0});
  Publish(1, 0);
  EXPECT_TRUE(cache().retention().Pin(1, ShareOf(1, 0).key, 0));
  Publish(1, 1);
  EXPECT_EQ(cache().Reserve(kRank0, ShareOf(2, 0)).outcome, ReserveOutcome::kNoSpace);
  EXPECT_THAT(Reasons(1), Each(MissReason::kNone));
}

TEST_F(BundleTest, ExpireAsOne) {
  Make({.hbm = 0, .dram = 32});
  cache().retention().SetTimeToLive(1, 1000);
  PublishBoth(1);
  PublishBoth(2);
  rig_->clock.Advance(999);
  EXPECT_THAT(Reason(2, 0), MissReason::kNone);  // a use of both
  rig_->clock.Advance(1);
  cache().Tick();
  EXPECT_EQ(cache().stats().objects, 2u);
  EXPECT_THAT(Reasons(1), Each(MissReason::kExpired));
  EXPECT_THAT(Reasons(2), Each(MissReason::kNone));
}

TEST_F(BundleTest, ACorruptHeaderOfOneDropsAll) {
  Make({.hbm = 0, .dram = 32, .ssd = 0});
  PublishBoth(1);
  const Match match = Lookup(1, 1);
  CorruptHeader(*rig_->dram, *match.found[0].slot, 40);
  cache().Release(kRank1, match.lease);
  EXPECT_EQ(Reason(1, 0), MissReason::kChecksumFailed);
  EXPECT_EQ(cache().stats().objects, 0u);
  EXPECT_EQ(rig_->dram->Usage(1).used_bytes, 0u);
}

TEST_F(BundleTest, ComesUpFromLowerTiersAsOne) {
  Make({.hbm = 0, .dram = 7, .ssd = 64});
  for (uint64_t text = 1; text <= 3; ++text) PublishBoth(text);
  EXPECT_THAT(rig_->observer.evicted, IsEmpty());
  for (uint64_t text = 1; text <= 3; ++text) {
    const Match match = Lookup(text, 0);
    ASSERT_EQ(match.found[0].reason, MissReason::kNone) << text;
    const auto other = cache().Attach(kRank1, match.lease, TensorShard{.rank = 1, .size = 2});
    EXPECT_EQ(Land(text, 1, other->lease), MissReason::kNone);
    EXPECT_EQ(Land(text, 0, match.lease), MissReason::kNone);
    cache().Release(kRank0, match.lease);
    cache().Release(kRank1, other->lease);
  }
}

TEST_F(BundleTest, ABundleThatDoesNotFitTheTopTierIsRefused) {
  Make({.hbm = 4, .dram = 16, .ssd = 64});
  PublishBoth(1);  // the second shard drove the first one out of the top
  EXPECT_THAT(Reasons(1), Each(MissReason::kBudgetRefused));
  EXPECT_THAT(cache().upkeep().inventory().Where(1, ShareOf(1, 0).key, ShareOf(1, 0).shard),
              ElementsAre(TierKind::kDram, TierKind::kSsd));
}

TEST_F(BundleTest, SurvivesARestartIfAllShardsWereAcknowledged) {
  Make({.hbm = 0, .dram = 32, .ssd = 64});
  PublishBoth(1);
  Publish(2, 0);
  rig_->Restart();
  Open();
  EXPECT_THAT(Reasons(1), Each(MissReason::kNone));
  EXPECT_THAT(Reasons(2), Each(MissReason::kBeingPublished));
  Publish(2, 1);
  const Match match = Lookup(2, 0);
  EXPECT_EQ(Land(2, 0, match.lease), MissReason::kNone);
}

TEST_F(BundleTest, ExplainsHowManyShardsExist) {
  Make({.hbm = 0, .dram = 32});
  Publish(1, 1);
  const ObjectHeader plan = ShareOf(1, 0);
  const Query query{.kind = plan.kind, .key = plan.key, .tokens = plan.tokens};  // operators do not specify shards
  Explanation why = cache().explainer().Explain(1, query);
  EXPECT_EQ(why.reason, MissReason::kBeingPublished);
  EXPECT_EQ(why.present->shards, 1u);
  EXPECT_EQ(why.present->of_shards, 2u);
  Publish(1, 0);
  why = cache().explainer().Explain(1, query);
  EXPECT_EQ(why.reason, MissReason::kNone);
  EXPECT_EQ(why.present->shards, 2u);
  EXPECT_EQ(why.present->bytes, 2 * plan.bytes);
}

TEST_F(BundleTest, AnAbandonedShardCanBePublishedAgain) {
  Make({.hbm = 0, .dram = 32});
  Publish(1, 0);
  const Cache::Reservation abandoned = cache().Reserve(kRank1, ShareOf(1, 1));
  ASSERT_EQ(abandoned.outcome, ReserveOutcome::kGranted);
  cache().Abandon(kRank1, abandoned.id);
  EXPECT_EQ(cache().Reserve(kRank0, ShareOf(1, 0)).outcome, ReserveOutcome::kAlreadyPresent);
  Publish(1, 1);
  EXPECT_THAT(Reasons(1), Each(MissReason::kNone));
}

}  // namespace
}  // namespace ashlar::storage
