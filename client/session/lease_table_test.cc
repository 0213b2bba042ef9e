// SPDX-License-Identifier: Apache-2.0
#include "client/session/lease_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace ashlar::internal {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::IsEmpty;

TEST(LeaseTable, ReleasesOnlyWithTheLastHolder) {
  int wakes = 0;
  LeaseTable leases([&] { ++wakes; });
  ASSERT_TRUE(leases.Hold("a", After(milliseconds(0))));
  ASSERT_TRUE(leases.Hold("a", After(milliseconds(0))));
  leases.Drop("a");
  EXPECT_THAT(leases.TakeUnheld(8), IsEmpty());
  EXPECT_EQ(wakes, 0);
  leases.Drop("a");
  EXPECT_EQ(wakes, 1);
  EXPECT_THAT(leases.TakeUnheld(8), ElementsAre("a"));
  EXPECT_THAT(leases.TakeUnheld(8), IsEmpty());
}

TEST(LeaseTable, HoldingAgainBeforeTheReleaseKeepsTheLease) {
  LeaseTable leases([] {});
  ASSERT_TRUE(leases.Hold("a", After(milliseconds(0))));
  leases.Drop("a");
  ASSERT_TRUE(leases.Hold("a", After(milliseconds(0))));
  EXPECT_THAT(leases.TakeUnheld(8), IsEmpty());
}

TEST(LeaseTable, HoldingWaitsForAReleaseInFlight) {
  LeaseTable leases([] {});
  ASSERT_TRUE(leases.Hold("a", After(milliseconds(0))));
  leases.Drop("a");
  const std::vector<std::string> taken = leases.TakeUnheld(8);
  ASSERT_THAT(taken, ElementsAre("a"));
  EXPECT_FALSE(leases.Hold("a", After(milliseconds(1))));
  std::thread daemon([&] { leases.Settle(taken, true); });
  EXPECT_TRUE(leases.Hold("a", After(std::chrono::seconds(30))));
  daemon.join();
}

TEST(LeaseTable, RetriesFailedReleases) {
  LeaseTable leases([] {});
  ASSERT_TRUE(leases.Hold("a", After(milliseconds(0))));
  leases.Drop("a");
  leases.Settle(leases.TakeUnheld(8), false);
  EXPECT_THAT(leases.TakeUnheld(8), ElementsAre("a"));
}

TEST(LeaseTable, ReportsOnceThatLeasesWaitForUse) {
  LeaseTable leases([] {});
  for (const char* lease : {"a", "b", "c"}) ASSERT_TRUE(leases.Hold(lease, After(milliseconds(0))));
  EXPECT_THAT(leases.TakeUnused(After(milliseconds(-1000)), 8), IsEmpty()) << "too early";
  leases.Used("b");
  leases.Drop("c");
  EXPECT_THAT(leases.TakeUnused(After(milliseconds(0)), 8), ElementsAre("a"));
  EXPECT_THAT(leases.TakeUnused(After(milliseconds(0)), 8), IsEmpty());
  for (const char* lease : {"d", "e"}) ASSERT_TRUE(leases.Hold(lease, After(milliseconds(0))));
  EXPECT_THAT(leases.TakeUnused(After(milliseconds(0)), 1), ElementsAre("d"));
  EXPECT_THAT(leases.TakeUnused(After(milliseconds(0)), 1), ElementsAre("e"));
}

TEST(LeaseTable, TakesAtMostTheRequestedNumber) {
  LeaseTable leases([] {});
  for (const char* lease : {"a", "b", "c"}) {
    ASSERT_TRUE(leases.Hold(lease, After(milliseconds(0))));
    leases.Drop(lease);
  }
  EXPECT_EQ(leases.TakeUnheld(2).size(), 2u);
  EXPECT_EQ(leases.TakeUnheld(2).size(), 1u);
}

}  // namespace
}  // namespace ashlar::internal
