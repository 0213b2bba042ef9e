// SPDX-License-Identifier: Apache-2.0
// Explanations of misses: what the cache reports about absent objects, and that asking changes nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "storage/cache.h"
#include "storage/testing/rig.h"
#include "storage/testing/tenants.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
constexpr TextDigest kText{5, 6};

NamespaceId Ns(uint8_t number) {
  NamespaceId ns;
  ns.bytes.fill(number);
  return ns;
}

class ExplainTest : public ::testing::Test {
 protected:
  ExplainTest() {
    rig_.cache.OpenSession(kAnn, kTenant);
    rig_.cache.OpenSession(kBob, kTenant);
    rig_.cache.OpenSession(kEve, kOther);
  }
  Explanation Explain(const Query& query, TenantId tenant = kTenant) {
    return cache_.explainer().Explain(tenant, query);
  }
  Explanation Explain(const ObjectHeader& plan) { return Explain(rig_.Ask(plan)); }
  MissReason Reason(SessionId session, const Query& query) {
    const Match match = cache_.Lookup(session, {&query, 1});
    cache_.Release(session, match.lease);
    return match.found[0].reason;
  }

  Rig rig_{7};  // extents a tenant: two objects of three
  Cache& cache_ = rig_.cache;
};

TEST_F(ExplainTest, ExplainsEveryStageOfAnObject) {
  const ObjectHeader plan = TestPlan(1, 64);
  EXPECT_EQ(Explain(plan).reason, MissReason::kNeverSeen);

  const auto abandoned = cache_.Reserve(kAnn, plan);
  EXPECT_EQ(Explain(plan).reason, MissReason::kBeingPublished);
  EXPECT_EQ(Explain(plan).present->bytes, plan.bytes);
  cache_.Abandon(kAnn, abandoned.id);
  EXPECT_EQ(Explain(plan).reason, MissReason::kAbandoned);
  EXPECT_EQ(Explain(plan).ghost->tier, TierKind::kNone);

  ASSERT_TRUE(rig_.Publish(kAnn, plan, 1));
  rig_.clock.Advance(100);
  EXPECT_EQ(rig_.Reason(kBob, plan), MissReason::kNone);
  rig_.clock.Advance(20);
  const Match leased = rig_.Lookup(kBob, plan);
  rig_.clock.Advance(3);
  for (int again = 0; again < 3; ++again) {
    const Explanation there = Explain(plan);
    EXPECT_EQ(there.reason, MissReason::kNone);
    EXPECT_EQ(there.present->tier, TierKind::kDram);
    EXPECT_EQ(there.present->tiers, std::vector{TierKind::kDram});
    EXPECT_EQ(there.present->uses, 2u) << "asking is no use";
    EXPECT_EQ(there.present->references, 1u);
    EXPECT_EQ(there.present->age, 123);
    EXPECT_EQ(there.present->idle, 3);
  }
  cache_.Release(kBob, leased.lease);

  const Nanos evicted_at = rig_.clock.Now();
  ASSERT_TRUE(rig_.Publish(kAnn, TestPlan(2, 64), 2));
  ASSERT_TRUE(rig_.Publish(kAnn, TestPlan(3, 64), 3));
  const Explanation gone = Explain(plan);
  EXPECT_EQ(gone.reason, MissReason::kEvicted);
  EXPECT_FALSE(gone.present.has_value());
  EXPECT_EQ(gone.ghost->policy, PolicyKind::kPrice);
  EXPECT_EQ(gone.ghost->uses, 2u);
  EXPECT_EQ(gone.ghost->gone_at, evicted_at);
  EXPECT_EQ(gone.ghost->lived, 123);
  EXPECT_EQ(gone.ghost->idle, 3);
}

TEST_F(ExplainTest, ATextUnderAnotherNamespaceExplainsAMissOfTheSameTenant) {
  const ObjectHeader plan = TestPlan(1, 64);
  ASSERT_EQ(cache_.Reserve(kAnn, plan, kText).outcome, ReserveOutcome::kGranted);
  Query query{.key = TestPlan(2, 64).key, .ns = Ns(9), .text = kText, .tokens = 64};
  EXPECT_EQ(Reason(kBob, query), MissReason::kNamespaceDiffers);
  EXPECT_EQ(Reason(kEve, query), MissReason::kNeverSeen) << "another tenant learns nothing";
  EXPECT_EQ(Explain(query).elsewhere, plan.ns);
  EXPECT_FALSE(Explain(query, kOther).elsewhere.has_value());
  EXPECT_THAT(rig_.observer.misses, ElementsAre(MissReason::kNamespaceDiffers, MissReason::kNeverSeen));
  query.ns = plan.ns;
  EXPECT_EQ(Reason(kBob, query), MissReason::kNeverSeen);
  query.text = {};
  query.ns = Ns(9);
  EXPECT_EQ(Reason(kBob, query), MissReason::kNeverSeen) << "the text is not known";
}

TEST_F(ExplainTest, KnownReasonsAreNotReplacedByANamespace) {
  const ObjectHeader plan = TestPlan(1, 64);
  ASSERT_EQ(cache_.Reserve(kAnn, TestPlan(2, 64), kText).outcome, ReserveOutcome::kGranted);
  cache_.Abandon(kAnn, cache_.Reserve(kAnn, plan).id);
  EXPECT_EQ(Reason(kBob, {.key = plan.key, .ns = Ns(9), .text = kText, .tokens = 64}), MissReason::kAbandoned);
  EXPECT_EQ(Reason(kBob, {.key = plan.key, .ns = Ns(9), .text = kText, .tokens = 1, .storable = false}),
            MissReason::kTooShort);
}

TEST_F(ExplainTest, DeclinesObjectsSlowerToLandThanToCompute) {
  const ObjectHeader plan = TestPlan(1, 64), same = TestPlan(2, 64);
  const auto reserve = [&](Nanos recompute) {
    return cache_.Reserve(kBob, same, {}, PoolKind::kPublic, recompute).outcome;
  };
  ASSERT_TRUE(rig_.Publish(kAnn, plan, 1));
  const Match match = rig_.Lookup(kAnn, plan);
  const TestPages pages(16);
  const auto landing = rig_.StartLanding(kAnn, 1, match.lease, TestTarget(pages, {{0, 64}}));
  rig_.clock.Advance(1000);
  rig_.executor.CompleteAll();
  ASSERT_THAT(*landing->verdict, ElementsAre(MissReason::kNone));

  EXPECT_EQ(reserve(999), ReserveOutcome::kDeclined);
  EXPECT_EQ(cache_.stats().reservations, 0u);
  EXPECT_EQ(cache_.Reserve(kEve, same, {}, PoolKind::kPublic, 999).outcome, ReserveOutcome::kGranted)
      << "another tenant's landings need not take so long";
  cache_.CloseSession(kEve, [] {});
  EXPECT_EQ(Reason(kBob, rig_.Ask(same)), MissReason::kDeclined);
  const Explanation told = Explain(same);
  EXPECT_EQ(told.reason, MissReason::kDeclined);
  EXPECT_EQ(told.ghost->policy, PolicyKind::kBreakEven);
  EXPECT_EQ(told.ghost->bytes, same.bytes);
  EXPECT_EQ(told.ghost->gone_at, rig_.clock.Now());

  for (int i = 0; i < 14; ++i) ASSERT_EQ(reserve(999), ReserveOutcome::kDeclined) << i;
  EXPECT_EQ(reserve(999), ReserveOutcome::kGranted) << "one in sixteen";
  cache_.CloseSession(kBob, [] {});
  cache_.OpenSession(kBob, kTenant);
  EXPECT_EQ(reserve(1000), ReserveOutcome::kGranted) << "it pays";
  cache_.CloseSession(kBob, [] {});
  cache_.OpenSession(kBob, kTenant);
  EXPECT_EQ(reserve(0), ReserveOutcome::kGranted) << "the compute time is unknown";
}

TEST_F(ExplainTest, ListsTheLatestMissesOfLookupsAndLandings) {
  const ObjectHeader plan = TestPlan(1, 64), absent = TestPlan(2, 64);
  ASSERT_TRUE(rig_.Publish(kAnn, plan, 1));
  const std::vector<Query> queries = {rig_.Ask(absent), rig_.Ask(plan)};
  const Match match = cache_.Lookup(kBob, queries);
  Corrupt(*rig_.tier, *match.found[1].slot, *match.found[1].header, 0, PartForm::kState);
  TestPages pages(16);
  rig_.clock.Advance(5);
  const auto landing = rig_.StartLanding(kBob, 1, match.lease, TestTarget(pages, {{0, 0}, {1, 64}}));
  rig_.executor.CompleteAll();
  ASSERT_THAT(*landing->verdict, ElementsAre(MissReason::kNeverSeen, MissReason::kChecksumFailed));

  const std::vector<Miss> last = cache_.explainer().LastMisses(kTenant, 10);
  ASSERT_EQ(last.size(), 3u);
  EXPECT_EQ(last[0].why.reason, MissReason::kChecksumFailed);
  EXPECT_EQ(last[0].why.ghost->reason, MissReason::kChecksumFailed) << "it was dropped";
  EXPECT_EQ(last[0].query.key, plan.key);
  EXPECT_EQ(last[0].query.ns, plan.ns);
  EXPECT_EQ(last[0].at, rig_.clock.Now());
  EXPECT_EQ(last[1].why.reason, MissReason::kNeverSeen);
  EXPECT_EQ(last[2].query.key, absent.key);
  EXPECT_EQ(last[2].session, kBob);
  EXPECT_EQ(last[2].at, rig_.clock.Now() - 5);
  EXPECT_EQ(cache_.explainer().LastMisses(kTenant, 1).size(), 1u);
  EXPECT_THAT(cache_.explainer().LastMisses(kOther, 10), IsEmpty());
}

TEST_F(ExplainTest, ALandingWithoutALeaseIsListedWithoutNames) {
  const LeaseId unknown = {7};
  TestPages pages(16);
  const auto landing = rig_.StartLanding(kBob, 1, unknown, TestTarget(pages, {{0, 0}}));
  ASSERT_THAT(*landing->verdict, ElementsAre(MissReason::kLeaseLost));
  const std::vector<Miss> last = cache_.explainer().LastMisses(kTenant, 10);
  ASSERT_EQ(last.size(), 1u);
  EXPECT_EQ(last[0].why.reason, MissReason::kLeaseLost);
  EXPECT_EQ(last[0].query.key, Key{});
}

}  // namespace
}  // namespace ashlar::storage
