// SPDX-License-Identifier: Apache-2.0
// Corrupt bytes, invalid calls and full queues: each is a miss with a reason, and changes nothing else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "storage/cache.h"
#include "storage/testing/rig.h"
#include "storage/testing/tenants.h"

namespace ashlar::storage {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;

class CacheFaultsTest : public ::testing::Test {
 protected:
  CacheFaultsTest() {
    rig_.cache.OpenSession(kAnn, 1);
    rig_.cache.OpenSession(kEve, 2);
  }
  std::vector<MissReason> Land(SessionId session, const LeaseId& lease, std::vector<LandTarget::Segment> segments) {
    const auto landing = rig_.StartLanding(session, ++landings_, lease, TestTarget(pages_, std::move(segments)));
    rig_.executor.CompleteAll();
    return landing->verdict.value();
  }
  bool Untouched() {
    return std::ranges::all_of(pages_.memory(), [](float x) { return x == 0; });
  }

  Rig rig_;
  Cache& cache_ = rig_.cache;
  const ObjectHeader plan_ = TestPlan(1, 64), other_ = TestPlan(2, 100);
  TestPages pages_{16};
  LandingId landings_ = 0;
};

TEST_F(CacheFaultsTest, CorruptedBytesInAnExtentAreAMissAndTheOthersLand) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  ASSERT_TRUE(rig_.Publish(kAnn, other_, 2));
  const std::vector<Query> queries = {rig_.Ask(plan_), rig_.Ask(other_)};
  const Match match = cache_.Lookup(kAnn, queries);
  const Match same = cache_.Lookup(kAnn, queries);
  Corrupt(*rig_.tier, *match.found[0].slot, *match.found[0].header, 2, PartForm::kState);
  const uint64_t used = rig_.tier->Usage(1).used_bytes;

  const auto landing = rig_.StartLanding(kAnn, 77, match.lease, TestTarget(pages_, {{0, 0}, {1, 64}}));
  rig_.executor.Complete(0);
  rig_.executor.Complete(0);
  EXPECT_FALSE(landing->verdict);
  EXPECT_EQ(rig_.Reason(kAnn, plan_), MissReason::kChecksumFailed) << "gone at once, not only with the verdict";
  rig_.executor.CompleteAll();
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kChecksumFailed, MissReason::kNone));
  EXPECT_LT(LandingError(pages_, other_, 2, 64), 1e-5);
  EXPECT_THAT(rig_.observer.evicted, ElementsAre(MissReason::kChecksumFailed));
  EXPECT_THAT(rig_.observer.misses, Contains(MissReason::kChecksumFailed));
  EXPECT_EQ(cache_.stats().objects, 1u);

  EXPECT_EQ(cache_.Held(kAnn, same.lease)->found[0].reason, MissReason::kChecksumFailed);
  EXPECT_THAT(Land(kAnn, same.lease, {{0, 0}}), ElementsAre(MissReason::kChecksumFailed));
  EXPECT_EQ(rig_.tier->Usage(1).used_bytes, used) << "two leases still point into it";
  cache_.Release(kAnn, match.lease);
  cache_.Release(kAnn, same.lease);
  EXPECT_EQ(rig_.tier->Usage(1).used_bytes, used - plan_.Extents() * limits::kExtentBytes);
  EXPECT_TRUE(rig_.Publish(kAnn, plan_, 1));
  EXPECT_EQ(rig_.Reason(kAnn, plan_), MissReason::kNone);
}

TEST_F(CacheFaultsTest, ACorruptHeaderIsAMissAndCanBeReplaced) {
  for (uint64_t offset = 0; offset < EncodedHeaderBytes(plan_.parts.size()); offset += 61) {
    SCOPED_TRACE(offset);
    ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
    const Match match = rig_.Lookup(kAnn, plan_);
    CorruptHeader(*rig_.tier, *match.found[0].slot, offset);
    rig_.observer.misses.clear();
    rig_.observer.evicted.clear();
    const Match missed = rig_.Lookup(kAnn, plan_);
    EXPECT_EQ(missed.found[0].reason, MissReason::kChecksumFailed);
    EXPECT_EQ(missed.lease, LeaseId{});
    EXPECT_THAT(rig_.observer.misses, ElementsAre(MissReason::kChecksumFailed));
    EXPECT_THAT(rig_.observer.evicted, ElementsAre(MissReason::kChecksumFailed));
    EXPECT_EQ(cache_.stats().objects, 0u);
    // Other holders are informed, and a new copy replaces it meanwhile.
    EXPECT_THAT(Land(kAnn, match.lease, {{0, 0}}), ElementsAre(MissReason::kChecksumFailed));
    ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
    const Match again = rig_.Lookup(kAnn, plan_);
    CorruptHeader(*rig_.tier, *again.found[0].slot, offset);  // after the lookup: the engine detects it first
    cache_.Release(kAnn, again.lease);
    ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1)) << "it is not called present";
    EXPECT_EQ(rig_.Reason(kAnn, plan_), MissReason::kNone);
    cache_.Release(kAnn, match.lease);
    const Match last = rig_.Lookup(kAnn, plan_);
    CorruptHeader(*rig_.tier, *last.found[0].slot, offset);
    EXPECT_EQ(rig_.Reason(kAnn, plan_), MissReason::kChecksumFailed);
    cache_.Release(kAnn, last.lease);
    EXPECT_EQ(rig_.tier->Usage(1).used_bytes, 0u);
  }
}

TEST_F(CacheFaultsTest, AWrongChecksumOfAnyPartIsAMiss) {
  for (const Part& part : plan_.parts) {
    SCOPED_TRACE(std::string(Name(part.form)) + " of layer " + std::to_string(part.layer));
    ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
    const Match match = rig_.Lookup(kAnn, plan_);
    Corrupt(*rig_.tier, *match.found[0].slot, *match.found[0].header, part.layer, part.form);
    EXPECT_THAT(Land(kAnn, match.lease, {{0, 0}}), ElementsAre(MissReason::kChecksumFailed));
    cache_.Release(kAnn, match.lease);
  }
  EXPECT_EQ(rig_.tier->Usage(1).used_bytes, 0u);
}

TEST_F(CacheFaultsTest, AStaleLeaseLandsNothing) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const Match match = rig_.Lookup(kAnn, plan_);
  cache_.Release(kAnn, match.lease);
  EXPECT_THAT(Land(kAnn, match.lease, {{0, 0}, {1, 64}}), ElementsAre(MissReason::kLeaseLost, MissReason::kLeaseLost));
  EXPECT_THAT(Land(kAnn, LeaseId{1, 2, 3}, {{0, 0}}), ElementsAre(MissReason::kLeaseLost));
  EXPECT_TRUE(Untouched());
  EXPECT_TRUE(absl::IsNotFound(cache_.Attach(kAnn, match.lease).status()));
}

TEST_F(CacheFaultsTest, AnotherTenantSeesNothing) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const Match match = rig_.Lookup(kAnn, plan_);
  EXPECT_EQ(rig_.Reason(kEve, plan_), MissReason::kNeverSeen) << "even with the key in hand";
  EXPECT_TRUE(absl::IsNotFound(cache_.Attach(kEve, match.lease).status()));
  EXPECT_TRUE(absl::IsNotFound(cache_.Held(kEve, match.lease).status()));
  EXPECT_THAT(Land(kEve, match.lease, {{0, 0}}), ElementsAre(MissReason::kLeaseLost));
  cache_.Release(kEve, match.lease);
  EXPECT_TRUE(cache_.Held(kAnn, match.lease).ok());
  EXPECT_TRUE(absl::IsNotFound(rig_.tier->Descriptor(2, match.found[0].slot->runs[0].arena).status()));

  const auto reservation = cache_.Reserve(kAnn, other_);
  EXPECT_EQ(*rig_.StartPublish(kEve, reservation.id, TestSource(other_, 2)), PublishOutcome::kUnknownReservation);
  EXPECT_NE(cache_.Planned(kAnn, reservation.id), nullptr);
  EXPECT_TRUE(Untouched());
}

TEST_F(CacheFaultsTest, SegmentsThatDoNotFitAreNotTouched) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const std::vector<Query> queries = {rig_.Ask(other_), rig_.Ask(plan_)};
  const Match match = cache_.Lookup(kAnn, queries);
  EXPECT_THAT(Land(kAnn, match.lease, {{0, 0}, {2, 0}, {1, 16 * 16 - 59}}),
              ElementsAre(MissReason::kNeverSeen, MissReason::kInvalidRequest, MissReason::kInvalidRequest));
  LandTarget other_shape = TestTarget(pages_, {{1, 0}});
  other_shape.rows[0].heads = 4;
  EXPECT_THAT(*rig_.StartLanding(kAnn, 99, match.lease, std::move(other_shape))->verdict,
              ElementsAre(MissReason::kInvalidRequest));
  EXPECT_TRUE(Untouched());
  EXPECT_THAT(Land(kAnn, match.lease, {{0, 0}, {1, 16}}), ElementsAre(MissReason::kNeverSeen, MissReason::kNone));
  EXPECT_LT(LandingError(pages_, plan_, 1, 16), 1e-5);
}

TEST_F(CacheFaultsTest, ALandingIdIsNotUsedTwiceAtOnce) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const Match match = rig_.Lookup(kAnn, plan_);
  const auto first = rig_.StartLanding(kAnn, 5, match.lease, TestTarget(pages_, {{0, 0}}));
  const auto second = rig_.StartLanding(kAnn, 5, match.lease, TestTarget(pages_, {{0, 64}}));
  EXPECT_THAT(*second->verdict, ElementsAre(MissReason::kInvalidRequest));
  rig_.executor.CompleteAll();
  EXPECT_THAT(*first->verdict, ElementsAre(MissReason::kNone));
}

TEST_F(CacheFaultsTest, ABadSourceEndsTheReservation) {
  const auto reservation = cache_.Reserve(kAnn, plan_);
  PublishSource source = TestSource(plan_, 1);
  source.tensors.pop_back();
  EXPECT_EQ(*rig_.StartPublish(kAnn, reservation.id, std::move(source)), PublishOutcome::kBadSource);
  EXPECT_EQ(cache_.stats().reservations, 0u);
  EXPECT_EQ(rig_.tier->Usage(1).used_bytes, 0u);
  EXPECT_EQ(rig_.Reason(kAnn, plan_), MissReason::kAbandoned);
}

TEST_F(CacheFaultsTest, APublishIsNotStartedTwice) {
  const auto reservation = cache_.Reserve(kAnn, plan_);
  const auto first = rig_.StartPublish(kAnn, reservation.id, TestSource(plan_, 1));
  EXPECT_EQ(*rig_.StartPublish(kAnn, reservation.id, TestSource(plan_, 1)), PublishOutcome::kUnknownReservation);
  rig_.executor.CompleteAll();
  EXPECT_EQ(*first, PublishOutcome::kPublished);
}

TEST_F(CacheFaultsTest, AFullExecutorIsBusyAtOnce) {
  const auto reservation = cache_.Reserve(kAnn, plan_);
  rig_.executor.set_capacity(0);
  EXPECT_EQ(*rig_.StartPublish(kAnn, reservation.id, TestSource(plan_, 1)), PublishOutcome::kBusy);
  rig_.executor.set_capacity(1);
  const auto retried = rig_.StartPublish(kAnn, reservation.id, TestSource(plan_, 1));
  rig_.executor.CompleteAll();
  EXPECT_EQ(*retried, PublishOutcome::kPublished) << "busy leaves the reservation as it was";

  const Match match = rig_.Lookup(kAnn, plan_);
  rig_.executor.set_capacity(0);
  EXPECT_THAT(Land(kAnn, match.lease, {{0, 0}}), ElementsAre(MissReason::kBusy));
  EXPECT_TRUE(Untouched());
  bool drained = false;
  cache_.CloseSession(kAnn, [&] { drained = true; });
  EXPECT_TRUE(drained);
}

TEST_F(CacheFaultsTest, LeasesPerSessionAreBounded) {
  Rig rig(16, {.leases_per_session = 2});
  rig.cache.OpenSession(kAnn, 1);
  rig.cache.OpenSession(kBob, 1);
  ASSERT_TRUE(rig.Publish(kAnn, plan_, 1));
  const Match first = rig.Lookup(kAnn, plan_), second = rig.Lookup(kAnn, plan_), bobs = rig.Lookup(kBob, plan_);
  const Match refused = rig.Lookup(kAnn, plan_);
  EXPECT_EQ(refused.found[0].reason, MissReason::kBusy);
  EXPECT_EQ(refused.lease, LeaseId{});
  EXPECT_TRUE(absl::IsResourceExhausted(rig.cache.Attach(kAnn, bobs.lease).status()));
  EXPECT_TRUE(rig.cache.Attach(kBob, first.lease).ok()) << "others have their own limit";

  rig.cache.Release(kAnn, first.lease);
  EXPECT_EQ(rig.Reason(kAnn, plan_), MissReason::kNone);
  rig.clock.Advance(60'000'000'000);
  rig.cache.Tick();
  EXPECT_EQ(rig.cache.stats().leases, 1u) << "expired leases count no longer; Bob's attached one stays";
  EXPECT_EQ(rig.Reason(kAnn, plan_), MissReason::kNone);
}

TEST_F(CacheFaultsTest, SegmentsInASessionsLeasesAreBounded) {
  Rig rig(16, {.leased_segments_per_session = 5});
  rig.cache.OpenSession(kAnn, 1);
  ASSERT_TRUE(rig.Publish(kAnn, plan_, 1));
  const std::vector<Query> two = {rig.Ask(plan_), rig.Ask(other_)}, six(6, rig.Ask(plan_));
  const Match first = rig.cache.Lookup(kAnn, two), second = rig.cache.Lookup(kAnn, two);
  ASSERT_EQ(second.found[0].reason, MissReason::kNone);
  const int hits = rig.observer.hits;
  const Match refused = rig.cache.Lookup(kAnn, two);
  EXPECT_EQ(refused.found[0].reason, MissReason::kBusy);
  EXPECT_EQ(refused.found[1].reason, MissReason::kBusy);
  EXPECT_EQ(refused.lease, LeaseId{});
  EXPECT_EQ(rig.observer.hits, hits);
  EXPECT_EQ(rig.Reason(kAnn, plan_), MissReason::kNone) << "there is space for one";

  rig.cache.Release(kAnn, first.lease);
  EXPECT_EQ(rig.cache.Lookup(kAnn, two).found[0].reason, MissReason::kNone);
  rig.cache.CloseSession(kAnn, [] {});
  rig.cache.OpenSession(kAnn, 1);
  EXPECT_EQ(rig.cache.Lookup(kAnn, six).found[0].reason, MissReason::kBusy) << "more than any session may hold";
}

TEST_F(CacheFaultsTest, AHitWithoutSpaceInTheAnswerIsOneMiss) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const int hits = rig_.observer.hits;
  const size_t misses = rig_.observer.misses.size();
  const std::vector<Query> three(3, rig_.Ask(plan_));
  int asked = 0;
  const Match match = cache_.Lookup(kAnn, three, [&](const Found& hit) {
    EXPECT_NE(hit.slot, nullptr);
    return ++asked < 3;
  });
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(match.found[1].reason, MissReason::kNone);
  EXPECT_EQ(match.found[2].reason, MissReason::kBusy);
  EXPECT_EQ(rig_.observer.hits - hits, 2);
  EXPECT_EQ(rig_.observer.misses.size() - misses, 1u);
  const auto held = cache_.Held(kAnn, match.lease);
  ASSERT_TRUE(held.ok());
  EXPECT_EQ(held->found[2].reason, MissReason::kNone) << "it is leased all the same";
}

TEST_F(CacheFaultsTest, AnOverfullBudgetIsRefusedAndHeld) {
  Rig rig(8);
  rig.cache.OpenSession(kAnn, 1);
  rig.cache.OpenSession(kEve, 2);
  const ObjectHeader huge = TestPlan(9, 6000);
  ASSERT_GT(huge.Extents(), 8u);
  ASSERT_TRUE(rig.Publish(kAnn, plan_, 1));
  EXPECT_EQ(rig.cache.Reserve(kAnn, huge).outcome, ReserveOutcome::kNoSpace);
  EXPECT_EQ(rig.Reason(kAnn, plan_), MissReason::kNone) << "nothing was evicted for what can never fit";

  ASSERT_EQ(rig.cache.Reserve(kAnn, TestPlan(3, 64)).outcome, ReserveOutcome::kGranted);
  const Match match = rig.Lookup(kAnn, plan_);
  EXPECT_EQ(rig.cache.Reserve(kAnn, TestPlan(4, 64)).outcome, ReserveOutcome::kNoSpace);
  EXPECT_TRUE(rig.Publish(kEve, TestPlan(5, 64, ObjectKind::kSegment, 2), 5)) << "another tenant's budget is its own";
  EXPECT_LE(rig.tier->Usage(1).held_bytes, 8 * limits::kExtentBytes);
}

}  // namespace
}  // namespace ashlar::storage
