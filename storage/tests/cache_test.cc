// SPDX-License-Identifier: Apache-2.0
// The cache's calls when nothing fails.
#include "storage/cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "storage/testing/rig.h"
#include "storage/testing/tenants.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;

class CacheTest : public ::testing::Test {
 protected:
  CacheTest() {
    rig_.cache.OpenSession(kAnn, 1);
    rig_.cache.OpenSession(kBob, 1);
  }
  Rig rig_;
  Cache& cache_ = rig_.cache;
};

TEST_F(CacheTest, FindsNothingBeforeThePublishIsDone) {
  const ObjectHeader plan = TestPlan(1, 64);
  EXPECT_EQ(rig_.Reason(kBob, plan), MissReason::kNeverSeen);
  const auto reservation = cache_.Reserve(kAnn, plan);
  ASSERT_EQ(reservation.outcome, ReserveOutcome::kGranted);
  ASSERT_NE(cache_.Planned(kAnn, reservation.id), nullptr);
  EXPECT_EQ(*cache_.Planned(kAnn, reservation.id), plan);
  EXPECT_EQ(cache_.Planned(kBob, reservation.id), nullptr) << "a reservation is its session's";
  EXPECT_EQ(rig_.Reason(kBob, plan), MissReason::kBeingPublished);

  const auto outcome = rig_.StartPublish(kAnn, reservation.id, TestSource(plan, 1));
  EXPECT_EQ(rig_.Reason(kBob, plan), MissReason::kBeingPublished);
  rig_.executor.Work(0);
  EXPECT_EQ(rig_.Reason(kBob, plan), MissReason::kBeingPublished);
  EXPECT_FALSE(*outcome);
  rig_.executor.Complete(0);
  EXPECT_EQ(*outcome, PublishOutcome::kPublished);
  EXPECT_EQ(cache_.Planned(kAnn, reservation.id), nullptr);

  const Match match = rig_.Lookup(kBob, plan);
  ASSERT_EQ(match.found[0].reason, MissReason::kNone);
  EXPECT_EQ(match.found[0].tier, TierKind::kDram);
  EXPECT_EQ(match.found[0].header->key, plan.key);
  EXPECT_EQ(TupleError(*rig_.tier, *match.found[0].slot, *match.found[0].header, 1), 0.0);
}

TEST_F(CacheTest, SecondPublisherGetsBeingPublished) {
  const ObjectHeader plan = TestPlan(1, 64);
  const auto first = cache_.Reserve(kAnn, plan);
  EXPECT_EQ(cache_.Reserve(kBob, plan).outcome, ReserveOutcome::kBeingPublished);
  EXPECT_EQ(cache_.Reserve(kAnn, plan).outcome, ReserveOutcome::kBeingPublished);
  (void)rig_.StartPublish(kAnn, first.id, TestSource(plan, 1));
  EXPECT_EQ(cache_.Reserve(kBob, plan).outcome, ReserveOutcome::kBeingPublished);
  rig_.executor.CompleteAll();
  EXPECT_EQ(cache_.Reserve(kBob, plan).outcome, ReserveOutcome::kAlreadyPresent);
  EXPECT_EQ(cache_.stats().objects, 1u);
}

TEST_F(CacheTest, AnAbandonedReservationFreesItsSpace) {
  const ObjectHeader plan = TestPlan(1, 64);
  const auto first = cache_.Reserve(kAnn, plan);
  cache_.Abandon(kBob, first.id);
  EXPECT_EQ(cache_.stats().reservations, 1u) << "not Bob's to abandon";
  cache_.Abandon(kAnn, first.id);
  cache_.Abandon(kAnn, first.id);
  EXPECT_EQ(rig_.Reason(kAnn, plan), MissReason::kAbandoned);
  EXPECT_EQ(*rig_.StartPublish(kAnn, first.id, TestSource(plan, 1)), PublishOutcome::kUnknownReservation);
  EXPECT_EQ(rig_.tier->Usage(1).used_bytes, 0u);
  EXPECT_TRUE(rig_.Publish(kBob, plan, 1));
}

TEST_F(CacheTest, LooksUpAndLeasesAWholePromptAtOnce) {
  const ObjectHeader a = TestPlan(1, 30, ObjectKind::kCheckpoint), b = TestPlan(2, 64), c = TestPlan(3, 64);
  ASSERT_TRUE(rig_.Publish(kAnn, a, 1));
  ASSERT_TRUE(rig_.Publish(kAnn, c, 3));
  Query short_one = rig_.Ask(TestPlan(4, 9));
  short_one.storable = false;
  const std::vector<Query> queries = {rig_.Ask(a), rig_.Ask(b), rig_.Ask(c), short_one, rig_.Ask(c)};
  const Match match = cache_.Lookup(kBob, queries);
  ASSERT_EQ(match.found.size(), 5u);
  EXPECT_EQ(match.found[0].reason, MissReason::kNone);
  EXPECT_EQ(match.found[1].reason, MissReason::kNeverSeen);
  EXPECT_EQ(match.found[2].reason, MissReason::kNone);
  EXPECT_EQ(match.found[3].reason, MissReason::kTooShort);
  EXPECT_EQ(match.found[4].header, match.found[2].header);
  EXPECT_EQ(cache_.stats().leases, 1u);
  EXPECT_EQ(rig_.observer.hits, 3);
  EXPECT_THAT(rig_.observer.misses, ElementsAre(MissReason::kNeverSeen, MissReason::kTooShort));

  const auto held = cache_.Held(kBob, match.lease);
  ASSERT_TRUE(held.ok());
  EXPECT_EQ(held->found[2].header, match.found[2].header);
  EXPECT_EQ(held->found[3].reason, MissReason::kTooShort);
  EXPECT_TRUE(absl::IsNotFound(cache_.Held(kAnn, match.lease).status()));
  cache_.Release(kBob, match.lease);
  EXPECT_EQ(cache_.stats().leases, 0u);
}

TEST_F(CacheTest, NoLeaseWithoutHits) {
  const Match match = rig_.Lookup(kAnn, TestPlan(1, 64));
  EXPECT_EQ(match.lease, LeaseId{});
  EXPECT_EQ(cache_.stats().leases, 0u);
}

TEST_F(CacheTest, LandsSegmentsWhereTheyStand) {
  const ObjectHeader first = TestPlan(1, 50, ObjectKind::kCheckpoint), second = TestPlan(2, 70),
                     third = TestPlan(3, 90);
  ASSERT_TRUE(rig_.Publish(kAnn, first, 1));
  ASSERT_TRUE(rig_.Publish(kAnn, second, 2));
  ASSERT_TRUE(rig_.Publish(kAnn, third, 3));
  const std::vector<Query> queries = {rig_.Ask(first), rig_.Ask(second), rig_.Ask(third)};
  const Match match = cache_.Lookup(kBob, queries);
  const TestPages pages(14);
  const auto landing = rig_.StartLanding(kBob, 5, match.lease, TestTarget(pages, {{0, 0}, {2, 50}, {1, 140}}));
  EXPECT_EQ(cache_.stats().landings, 1u);
  rig_.executor.CompleteAll();
  ASSERT_TRUE(landing->verdict);
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kNone, MissReason::kNone, MissReason::kNone));
  EXPECT_EQ(landing->layers, 2u);
  EXPECT_LT(LandingError(pages, *match.found[0].header, 1, 0), 1e-5);
  EXPECT_LT(LandingError(pages, *match.found[2].header, 3, 50), 1e-5);
  EXPECT_LT(LandingError(pages, *match.found[1].header, 2, 140), 1e-5);
  EXPECT_EQ(rig_.observer.landed_bytes, first.bytes + second.bytes + third.bytes);
  EXPECT_EQ(cache_.stats().landings, 0u);
}

TEST_F(CacheTest, ProgressComesLayerByLayer) {
  const ObjectHeader plan = TestPlan(1, 64);
  ASSERT_TRUE(rig_.Publish(kAnn, plan, 1));
  const Match match = rig_.Lookup(kAnn, plan);
  const TestPages pages(8);
  const auto landing = rig_.StartLanding(kAnn, 5, match.lease, TestTarget(pages, {{0, 16}}));
  rig_.executor.Complete(0);
  EXPECT_EQ(landing->layers, 1u);
  rig_.executor.Complete(0);
  EXPECT_EQ(landing->layers, 2u);
  EXPECT_FALSE(landing->verdict) << "the linear layer behind the last attention layer is still to be verified";
  rig_.executor.Complete(0);
  EXPECT_TRUE(landing->verdict);
}

TEST_F(CacheTest, EvictsTheLeastRecentlyUsedUnleasedObject) {
  Rig rig(9);
  rig.cache.OpenSession(kAnn, 1);
  const ObjectHeader plans[] = {TestPlan(1, 64), TestPlan(2, 64), TestPlan(3, 64), TestPlan(4, 64)};
  ASSERT_EQ(plans[0].Extents(), 3u);
  for (uint64_t text = 1; text <= 3; ++text) ASSERT_TRUE(rig.Publish(kAnn, plans[text - 1], text));
  const Match leased = rig.Lookup(kAnn, plans[0]);
  EXPECT_EQ(rig.Reason(kAnn, plans[1]), MissReason::kNone);

  ASSERT_TRUE(rig.Publish(kAnn, plans[3], 4));
  EXPECT_EQ(rig.Reason(kAnn, plans[2]), MissReason::kEvicted);
  ASSERT_TRUE(rig.Publish(kAnn, plans[2], 3));
  EXPECT_EQ(rig.Reason(kAnn, plans[1]), MissReason::kEvicted) << "used before text 4 came";
  EXPECT_EQ(rig.Reason(kAnn, plans[0]), MissReason::kNone);
  EXPECT_EQ(TupleError(*rig.tier, *leased.found[0].slot, *leased.found[0].header, 1), 0.0);

  const Match rest[] = {rig.Lookup(kAnn, plans[2]), rig.Lookup(kAnn, plans[3])};
  EXPECT_EQ(rig.cache.Reserve(kAnn, plans[1]).outcome, ReserveOutcome::kNoSpace);
  rig.cache.Release(kAnn, leased.lease);
  EXPECT_TRUE(rig.Publish(kAnn, plans[1], 2));
  EXPECT_EQ(rig.Reason(kAnn, plans[0]), MissReason::kEvicted);
  rig.cache.Release(kAnn, rest[0].lease);
}

TEST_F(CacheTest, AttachedSessionsShareALease) {
  const ObjectHeader plan = TestPlan(1, 64);
  ASSERT_TRUE(rig_.Publish(kAnn, plan, 1));
  const Match match = rig_.Lookup(kAnn, plan);
  const auto attached = cache_.Attach(kBob, match.lease);
  ASSERT_TRUE(attached.ok());
  EXPECT_EQ(attached->found[0].header, match.found[0].header);
  cache_.Release(kAnn, match.lease);

  const TestPages pages(8);
  const auto lost = rig_.StartLanding(kAnn, 1, match.lease, TestTarget(pages, {{0, 0}}));
  EXPECT_THAT(*lost->verdict, ElementsAre(MissReason::kLeaseLost));
  const auto landing = rig_.StartLanding(kBob, 1, match.lease, TestTarget(pages, {{0, 0}}));
  rig_.executor.CompleteAll();
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kNone));
}

}  // namespace
}  // namespace ashlar::storage
