// SPDX-License-Identifier: Apache-2.0
// Sessions, landings, leases and reservations that end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "storage/cache.h"
#include "storage/testing/rig.h"
#include "storage/testing/tenants.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
constexpr Nanos kSecond = 1'000'000'000;

class CacheSessionsTest : public ::testing::Test {
 protected:
  CacheSessionsTest() : rig_(64, {.unused_lease = 10 * kSecond, .reservation = 20 * kSecond}) {
    rig_.cache.OpenSession(kAnn, 1);
    rig_.cache.OpenSession(kBob, 1);
  }

  // Calls made, in order.
  std::function<void()> Note(const std::string& what) {
    return [this, what] { notes_.push_back(what); };
  }

  Rig rig_;
  Cache& cache_ = rig_.cache;
  const ObjectHeader plan_ = TestPlan(1, 64);
  TestPages pages_{8};
  std::vector<std::string> notes_;
};

TEST_F(CacheSessionsTest, ADeadEngineFreesItsLeasesAndReservations) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const Match match = rig_.Lookup(kAnn, plan_);
  ASSERT_EQ(cache_.Reserve(kAnn, TestPlan(2, 64)).outcome, ReserveOutcome::kGranted);
  cache_.CloseSession(kAnn, Note("drained"));
  EXPECT_THAT(notes_, ElementsAre("drained")) << "nothing was in flight";
  EXPECT_EQ(cache_.stats().leases, 0u);
  EXPECT_EQ(cache_.stats().reservations, 0u);
  EXPECT_EQ(rig_.Reason(kBob, TestPlan(2, 64)), MissReason::kAbandoned);
  EXPECT_EQ(rig_.Reason(kBob, plan_), MissReason::kNone) << "what it published stays";
}

TEST_F(CacheSessionsTest, ALeaseOutlivesOneOfItsHolders) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const Match match = rig_.Lookup(kAnn, plan_);
  ASSERT_TRUE(cache_.Attach(kBob, match.lease).ok());
  cache_.CloseSession(kAnn, Note("drained"));
  EXPECT_TRUE(cache_.Held(kBob, match.lease).ok());
  cache_.CloseSession(kBob, Note("drained"));
  EXPECT_EQ(cache_.stats().leases, 0u);
}

TEST_F(CacheSessionsTest, ASessionIsDrainedOnceItsMemoryIsUnused) {
  ASSERT_TRUE(rig_.Publish(kBob, plan_, 1));
  const Match match = rig_.Lookup(kAnn, plan_);
  const auto reservation = cache_.Reserve(kAnn, TestPlan(2, 64));
  cache_.Publish(kAnn, reservation.id, TestSource(TestPlan(2, 64), 2), [this](PublishOutcome outcome) {
    EXPECT_EQ(outcome, PublishOutcome::kUnavailable);
    notes_.push_back("publish");
  });
  cache_.Land(kAnn, 7, match.lease, TestTarget(pages_, {{0, 0}}),
              {.progress = [](uint32_t) { FAIL() << "cancelled before it began"; },
               .done =
                   [this](const std::vector<MissReason>& verdict) {
                     EXPECT_THAT(verdict, ElementsAre(MissReason::kCancelled));
                     notes_.push_back("landing");
                   }});
  cache_.CloseSession(kAnn, Note("drained"));
  cache_.CloseSession(kBob, Note("bob drained"));
  EXPECT_EQ(cache_.stats().leases, 0u);
  EXPECT_THAT(notes_, ElementsAre("bob drained"));
  rig_.executor.Complete(1);
  EXPECT_THAT(notes_, ElementsAre("bob drained", "landing"));
  rig_.executor.Complete(0);
  EXPECT_THAT(notes_, ElementsAre("bob drained", "landing", "publish", "drained"));
  EXPECT_THAT(pages_.memory(), ::testing::Each(0.0f));
  EXPECT_EQ(cache_.stats().objects, 1u);
  EXPECT_EQ(cache_.stats().reservations, 0u);
  EXPECT_EQ(rig_.tier->Usage(1).used_bytes, plan_.Extents() * limits::kExtentBytes);
}

TEST_F(CacheSessionsTest, CallsOfAClosedSessionDoNothing) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const Match match = rig_.Lookup(kAnn, plan_);
  cache_.CloseSession(kAnn, Note("drained"));
  EXPECT_EQ(rig_.Lookup(kAnn, plan_).found[0].reason, MissReason::kInvalidRequest);
  EXPECT_EQ(cache_.Reserve(kAnn, TestPlan(2, 64)).outcome, ReserveOutcome::kUnavailable);
  EXPECT_TRUE(absl::IsNotFound(cache_.Attach(kAnn, match.lease).status()));
  EXPECT_THAT(*rig_.StartLanding(kAnn, 1, match.lease, TestTarget(pages_, {{0, 0}}))->verdict,
              ElementsAre(MissReason::kLeaseLost));
}

TEST_F(CacheSessionsTest, AQuiescedLandingNeverWritesAgain) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const Match match = rig_.Lookup(kAnn, plan_);
  const auto landing = rig_.StartLanding(kAnn, 7, match.lease, TestTarget(pages_, {{0, 0}}));
  rig_.executor.Complete(0);
  EXPECT_EQ(landing->layers, 1u);
  cache_.Quiesce(kBob, 7, Note("not Bob's"));
  cache_.Quiesce(kAnn, 8, Note("unknown"));
  cache_.Quiesce(kAnn, 7, Note("quiesced"));
  EXPECT_THAT(notes_, ElementsAre("not Bob's", "unknown")) << "a layer is queued";
  const std::vector<float> before(pages_.memory().begin(), pages_.memory().end());
  rig_.executor.CompleteAll();
  EXPECT_THAT(notes_, ElementsAre("not Bob's", "unknown", "quiesced"));
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kCancelled));
  EXPECT_EQ(landing->layers, 1u);
  EXPECT_TRUE(std::ranges::equal(before, pages_.memory()));
  cache_.Quiesce(kAnn, 7, Note("still quiesced"));
  EXPECT_EQ(notes_.back(), "still quiesced");
}

TEST_F(CacheSessionsTest, ALandingKeepsItsObjectsWhenTheLeaseIsReleased) {
  Rig rig(6);  // space for one of the two objects
  rig.cache.OpenSession(kAnn, 1);
  ASSERT_TRUE(rig.Publish(kAnn, plan_, 1));
  const Match match = rig.Lookup(kAnn, plan_);
  const auto landing = rig.StartLanding(kAnn, 7, match.lease, TestTarget(pages_, {{0, 0}}));
  rig.cache.Release(kAnn, match.lease);
  EXPECT_EQ(rig.cache.Reserve(kAnn, TestPlan(2, 400)).outcome, ReserveOutcome::kNoSpace);
  rig.executor.CompleteAll();
  EXPECT_THAT(*landing->verdict, ElementsAre(MissReason::kNone));
  EXPECT_LT(LandingError(pages_, plan_, 1, 0), 1e-5);
  EXPECT_EQ(rig.cache.Reserve(kAnn, TestPlan(2, 400)).outcome, ReserveOutcome::kGranted);
}

TEST_F(CacheSessionsTest, AnUnusedLeaseEndsAtItsDeadline) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const Match unused = rig_.Lookup(kAnn, plan_), landed = rig_.Lookup(kAnn, plan_);
  (void)rig_.StartLanding(kAnn, 1, landed.lease, TestTarget(pages_, {{0, 0}}));
  rig_.executor.CompleteAll();
  rig_.clock.Advance(10 * kSecond - 1);
  cache_.Tick();
  EXPECT_EQ(cache_.stats().leases, 2u);
  rig_.clock.Advance(1);
  cache_.Tick();
  EXPECT_TRUE(absl::IsNotFound(cache_.Held(kAnn, unused.lease).status()));
  EXPECT_TRUE(cache_.Held(kAnn, landed.lease).ok());
}

TEST_F(CacheSessionsTest, AnUnpublishedReservationEndsAtItsDeadline) {
  const auto idle = cache_.Reserve(kAnn, TestPlan(1, 64));
  const auto publishing = cache_.Reserve(kAnn, TestPlan(2, 64));
  const auto outcome = rig_.StartPublish(kAnn, publishing.id, TestSource(TestPlan(2, 64), 2));
  rig_.clock.Advance(20 * kSecond);
  cache_.Tick();
  EXPECT_EQ(cache_.Planned(kAnn, idle.id), nullptr);
  EXPECT_EQ(rig_.Reason(kBob, TestPlan(1, 64)), MissReason::kAbandoned);
  EXPECT_EQ(*rig_.StartPublish(kAnn, idle.id, TestSource(TestPlan(1, 64), 1)), PublishOutcome::kUnknownReservation);
  cache_.Abandon(kAnn, publishing.id);
  rig_.executor.CompleteAll();
  EXPECT_EQ(*outcome, PublishOutcome::kPublished) << "one in flight is neither reclaimed nor abandoned";
}

// Six segments of one prompt, each of which takes most of a reservation's lifetime.
TEST_F(CacheSessionsTest, PublishesRenewTheSessionsOtherReservations) {
  std::vector<ReservationId> reservations;
  for (uint64_t text = 1; text <= 6; ++text) reservations.push_back(cache_.Reserve(kAnn, TestPlan(text, 64)).id);
  for (uint64_t text = 1; text <= 6; ++text) {
    rig_.clock.Advance(15 * kSecond);
    cache_.Tick();
    const auto outcome = rig_.StartPublish(kAnn, reservations[text - 1], TestSource(TestPlan(text, 64), text));
    rig_.executor.CompleteAll();
    EXPECT_EQ(*outcome, PublishOutcome::kPublished) << text;
  }
}

TEST_F(CacheSessionsTest, AErasedReservationEndsThoughItsSessionPublishes) {
  const ReservationId erased = cache_.Reserve(kAnn, TestPlan(100, 64)).id;
  Nanos lived = 0;
  for (uint64_t text = 1; cache_.Planned(kAnn, erased) != nullptr && text < 50; ++text) {
    ASSERT_TRUE(rig_.Publish(kAnn, TestPlan(text, 16), text));
    rig_.clock.Advance(10 * kSecond);
    lived += 10 * kSecond;
    cache_.Tick();
  }
  EXPECT_EQ(lived, 200 * kSecond);
}

TEST_F(CacheSessionsTest, ACopyThatEndsAfterItsSourcesDeadlineIsNeverFound) {
  const auto publish = [&](uint64_t text, Nanos copying) {
    const ObjectHeader plan = TestPlan(text, 64);
    PublishSource source = TestSource(plan, text);
    source.deadline = rig_.clock.Now() + kSecond;
    const auto outcome = rig_.StartPublish(kAnn, cache_.Reserve(kAnn, plan).id, std::move(source));
    rig_.clock.Advance(copying);
    rig_.executor.CompleteAll();
    return **outcome;
  };
  EXPECT_EQ(publish(1, kSecond), PublishOutcome::kPublished);
  EXPECT_EQ(publish(2, kSecond + 1), PublishOutcome::kUnavailable);
  EXPECT_EQ(rig_.Reason(kAnn, TestPlan(2, 64)), MissReason::kAbandoned);
  EXPECT_EQ(cache_.stats().reservations, 0u);
}

TEST_F(CacheSessionsTest, CallbacksMayCallTheCache) {
  ASSERT_TRUE(rig_.Publish(kAnn, plan_, 1));
  const Match match = rig_.Lookup(kAnn, plan_);
  cache_.Land(kAnn, 1, match.lease, TestTarget(pages_, {{0, 0}}),
              {.progress = [&](uint32_t) { cache_.Quiesce(kAnn, 1, Note("quiesced")); },
               .done =
                   [&](const std::vector<MissReason>&) {
                     cache_.Release(kAnn, match.lease);
                     cache_.CloseSession(kAnn, Note("drained"));
                   }});
  rig_.executor.CompleteAll();
  EXPECT_THAT(notes_, ElementsAre("quiesced", "drained"));
  EXPECT_EQ(cache_.stats().leases, 0u);
}

}  // namespace
}  // namespace ashlar::storage
