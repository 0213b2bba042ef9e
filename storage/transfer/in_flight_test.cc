// SPDX-License-Identifier: Apache-2.0
// Limits of work in flight per session and per tenant: only the session or tenant that exceeds its limit is refused.
#include "storage/transfer/in_flight.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "storage/testing/tenants.h"
#include "storage/testing/tiered_rig.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;

constexpr TenantId kBlue = 1, kGreen = 2;
constexpr SessionId kAmy = 3;  // Ann and Amy are Blue's
constexpr uint64_t kPages = 16;

class InFlightTest : public ::testing::Test {
 protected:
  using Landing = std::shared_ptr<Rig::Landing>;

  InFlightTest() {
    rig_.cache.OpenSession(kAnn, kBlue);
    rig_.cache.OpenSession(kAmy, kBlue);
    rig_.cache.OpenSession(kBob, kGreen);
    EXPECT_TRUE(rig_.Publish(kAnn, plan_, 1));
    EXPECT_TRUE(rig_.Publish(kBob, plan_, 1));
  }
  Landing Land(SessionId session) {
    return rig_.StartLanding(session, ++landings_, rig_.Lookup(session, plan_).lease, TestTarget(pages_, {{0, 7}}));
  }
  static bool Busy(const Landing& landing) { return landing->verdict == std::vector<MissReason>{MissReason::kBusy}; }
  static bool Landed(const Landing& landing) { return landing->verdict == std::vector<MissReason>{MissReason::kNone}; }

  Rig rig_{64, {.landings_per_session = 3}};
  const ObjectHeader plan_ = TestPlan(1, 64);
  const TestPages pages_{kPages};
  LandingId landings_ = 0;
};

TEST_F(InFlightTest, LandingsPerSessionAreBounded) {
  std::vector<Landing> landings;
  for (int i = 0; i < 3; ++i) landings.push_back(Land(kAnn));
  EXPECT_TRUE(Busy(Land(kAnn)));
  EXPECT_EQ(rig_.observer.misses.size(), 1u);
  landings.push_back(Land(kAmy));
  rig_.executor.CompleteAll();
  for (const Landing& landing : landings) EXPECT_TRUE(Landed(landing));
  const Landing again = Land(kAnn);
  rig_.executor.CompleteAll();
  EXPECT_TRUE(Landed(again));
}

TEST_F(InFlightTest, LandingsPerTenantAreBounded) {
  rig_.cache.SetBounds(kBlue, {.in_flight = InFlight::Bounds{.calls = 4}});
  std::vector<Landing> landings;
  for (const SessionId session : {kAnn, kAnn, kAmy, kAmy}) landings.push_back(Land(session));
  EXPECT_TRUE(Busy(Land(kAnn)));
  EXPECT_TRUE(Busy(Land(kAmy)));
  landings.push_back(Land(kBob));
  rig_.executor.CompleteAll();
  for (const Landing& landing : landings) EXPECT_TRUE(Landed(landing));
  const Landing again = Land(kAmy);
  rig_.executor.CompleteAll();
  EXPECT_TRUE(Landed(again));
}

TEST_F(InFlightTest, PageTablesCount) {
  rig_.cache.SetBounds(kBlue, {.in_flight = InFlight::Bounds{.bytes = 1 << 20}});
  const auto land = [&](SessionId session) {
    LandTarget target = TestTarget(pages_, {{0, 7}});
    target.page_table.resize(100'000);
    return rig_.StartLanding(session, ++landings_, rig_.Lookup(session, plan_).lease, std::move(target));
  };
  const Landing first = land(kAnn), second = land(kAmy);
  EXPECT_TRUE(Busy(land(kAnn))) << "1.2 MB";
  const Landing other = land(kBob);
  rig_.executor.CompleteAll();
  for (const Landing& landing : {first, second, other}) EXPECT_TRUE(Landed(landing));
  const Landing again = land(kAnn);
  rig_.executor.CompleteAll();
  EXPECT_TRUE(Landed(again));
}

TEST_F(InFlightTest, EndedSessionFreesSpace) {
  rig_.cache.SetBounds(kBlue, {.in_flight = InFlight::Bounds{.calls = 2}});
  const Landing first = Land(kAnn), second = Land(kAnn);
  rig_.cache.CloseSession(kAnn, [] {});
  EXPECT_TRUE(Busy(Land(kAmy))) << "they have not ended";
  rig_.executor.CompleteAll();
  const Landing after = Land(kAmy);
  rig_.executor.CompleteAll();
  EXPECT_TRUE(Landed(after));
}

// Objects waiting to be written to the disk, while nothing else needs the disk.
TEST(BehindTest, ATenantsBacklogDoesNotDelayOthersDiskWrites) {
  TieredRig rig({.hbm = 0, .dram = 400, .ssd = 400});
  rig.cache->OpenSession(kAnn, kBlue);
  rig.cache->OpenSession(kBob, kGreen);
  rig.io.set_capacity(1);
  for (uint64_t text = 1; text <= 100; ++text) ASSERT_TRUE(rig.Publish(kAnn, TestPlan(text, 64), text));
  const ObjectHeader plan = TestPlan(1, 64);
  ASSERT_TRUE(rig.Publish(kBob, plan, 1));
  int before = 0;
  for (; rig.cache->upkeep().inventory().Where(kGreen, plan.key).back() != TierKind::kSsd; ++before) rig.io.Complete(0);
  EXPECT_LE(before, 12) << "pieces, syncs and records";
  for (const SessionId session : {kAnn, kBob}) rig.cache->CloseSession(session, [] {});
  rig.Settle();
}

}  // namespace
}  // namespace ashlar::storage
