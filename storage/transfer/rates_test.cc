// SPDX-License-Identifier: Apache-2.0
// Rate limits of tenants: a tenant that exceeds its limit is refused until the next second, and no other tenant is.
#include "storage/transfer/rates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "storage/testing/rig.h"
#include "storage/testing/tenants.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;

constexpr TenantId kSlow = 1, kFree = 2;
constexpr Nanos kSecond = 1'000'000'000;

class RatesTest : public ::testing::Test {
 protected:
  // Returns how many of `asked` requests are granted at one moment.
  int Taken(TenantId tenant, int asked, uint64_t amount = 1) {
    int taken = 0;
    for (int i = 0; i < asked; ++i) taken += rates_.Take(tenant, amount) ? 1 : 0;
    return taken;
  }

  ManualClock clock_;
  Rates rates_{clock_};
};

TEST_F(RatesTest, SavesUpToOneSecond) {
  for (const uint64_t limit : {1, 3, 7, 1000}) {
    rates_.SetLimit(kSlow, limit);
    clock_.Advance(10 * kSecond);
    EXPECT_EQ(Taken(kSlow, 2000), static_cast<int>(limit));
    EXPECT_TRUE(rates_.Spent(kSlow));
    clock_.Advance(kSecond + 1000);
    EXPECT_FALSE(rates_.Spent(kSlow));
    EXPECT_EQ(Taken(kSlow, 2000), static_cast<int>(limit)) << "not two seconds' worth";
  }
}

TEST_F(RatesTest, RefillsGradually) {
  rates_.SetLimit(kSlow, 10);
  EXPECT_EQ(Taken(kSlow, 20), 10);
  clock_.Advance(kSecond / 20);
  EXPECT_EQ(Taken(kSlow, 20), 0) << "half a call is none";
  clock_.Advance(9 * kSecond / 20);
  EXPECT_EQ(Taken(kSlow, 20), 5);
}

TEST_F(RatesTest, AllowsAndChargesLargeAmounts) {
  rates_.SetLimit(kSlow, 100);
  EXPECT_EQ(Taken(kSlow, 1, 450), 1);
  clock_.Advance(7 * kSecond / 2);
  EXPECT_EQ(Taken(kSlow, 1), 0);
  clock_.Advance(kSecond / 100);
  EXPECT_EQ(Taken(kSlow, 1), 1);
}

TEST_F(RatesTest, AnUnpayableDebtEnds) {
  rates_.SetLimit(kSlow, 1);
  EXPECT_EQ(Taken(kSlow, 1, UINT64_MAX), 1);
  clock_.Advance(3600 * kSecond);
  EXPECT_EQ(Taken(kSlow, 1), 1);
}

TEST_F(RatesTest, TenantsAreIndependent) {
  rates_.SetLimit(kSlow, 2);
  rates_.SetLimit(kFree, 2);
  EXPECT_EQ(Taken(kSlow, 5), 2);
  EXPECT_EQ(Taken(kFree, 2), 2);
  EXPECT_EQ(Taken(kEve, 5, 1 << 30), 5) << "none is set";
  EXPECT_EQ(rates_.refused(kSlow), 3u);
  EXPECT_EQ(rates_.refused(kFree), 0u);
  EXPECT_EQ(rates_.refused(kEve), 0u) << "the tenant is unknown";
}

TEST_F(RatesTest, ALimitMayChange) {
  rates_.SetLimit(kSlow, 1);
  EXPECT_EQ(Taken(kSlow, 5), 1);
  rates_.SetLimit(kSlow, Rates::kUnlimited);
  EXPECT_EQ(Taken(kSlow, 5), 5);
  EXPECT_FALSE(rates_.Spent(kSlow));
  rates_.SetLimit(kSlow, 1);
  EXPECT_EQ(rates_.limit(kSlow), 1u);
  EXPECT_EQ(Taken(kSlow, 5), 0) << "the first call of this second still counts";
}

// Landings and publishes, in a cache.
class ByteRateTest : public ::testing::Test {
 protected:
  using Landing = std::shared_ptr<Rig::Landing>;

  ByteRateTest() {
    rig_.cache.OpenSession(kAnn, kSlow);
    rig_.cache.OpenSession(kBob, kFree);
    EXPECT_TRUE(rig_.Publish(kAnn, plan_, 1));
    EXPECT_TRUE(rig_.Publish(kBob, plan_, 1));
    rig_.cache.byte_rates().SetLimit(kSlow, plan_.bytes);
  }
  std::vector<MissReason> Land(SessionId session) {
    const Landing landing =
        rig_.StartLanding(session, ++landings_, rig_.Lookup(session, plan_).lease, TestTarget(pages_, {{0, 7}}));
    rig_.executor.CompleteAll();
    return landing->verdict.value_or(std::vector<MissReason>());
  }

  Rig rig_{64};
  const ObjectHeader plan_ = TestPlan(1, 64);
  const TestPages pages_{16};
  LandingId landings_ = 0;
};

TEST_F(ByteRateTest, ALandingBeyondItIsMissedAndAnotherTenantsIsNot) {
  EXPECT_THAT(Land(kAnn), ElementsAre(MissReason::kNone));
  EXPECT_THAT(Land(kAnn), ElementsAre(MissReason::kBusy));
  EXPECT_THAT(rig_.observer.misses, ElementsAre(MissReason::kBusy));
  for (int i = 0; i < 3; ++i) EXPECT_THAT(Land(kBob), ElementsAre(MissReason::kNone));
  rig_.clock.Advance(kSecond);
  EXPECT_THAT(Land(kAnn), ElementsAre(MissReason::kNone));
  EXPECT_EQ(rig_.cache.byte_rates().refused(kSlow), 1u);
}

TEST_F(ByteRateTest, APublishBeyondItMayBeTriedAgain) {
  EXPECT_THAT(Land(kAnn), ElementsAre(MissReason::kNone));
  const ObjectHeader second = TestPlan(2, 64);
  const Cache::Reservation reservation = rig_.cache.Reserve(kAnn, second);
  ASSERT_EQ(reservation.outcome, ReserveOutcome::kGranted);
  const auto publish = [&] {
    const auto outcome = rig_.StartPublish(kAnn, reservation.id, TestSource(second, 2));
    rig_.executor.CompleteAll();
    return outcome->value();
  };
  EXPECT_EQ(publish(), PublishOutcome::kBusy);
  EXPECT_TRUE(rig_.Publish(kBob, second, 2));
  rig_.clock.Advance(kSecond);
  EXPECT_EQ(publish(), PublishOutcome::kPublished);
}

}  // namespace
}  // namespace ashlar::storage
