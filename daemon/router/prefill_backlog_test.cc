// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/prefill_backlog.h"

#include <gtest/gtest.h>

#include "storage/testing/manual_clock.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kBacklogSecond = 1'000'000'000;

NamespaceId Space(uint8_t number) {
  NamespaceId ns;
  ns.bytes[0] = number;
  return ns;
}

TEST(PrefillBacklog, EnginesComputeWhatTheyHaveLookedUpAtTheirRate) {
  storage::ManualClock clock;
  PrefillBacklog backlog(clock);
  EXPECT_EQ(backlog.Of(0, Space(1)).engines, 0u);
  backlog.Add(1, 0, Space(1), 1000, 500);
  EXPECT_EQ(backlog.Of(0, Space(1)).tokens, 1000u);
  EXPECT_EQ(backlog.Of(0, Space(1)).wait, 2 * kBacklogSecond);
  clock.Advance(kBacklogSecond);
  EXPECT_EQ(backlog.Of(0, Space(1)).tokens, 500u);
  backlog.Add(1, 0, Space(1), 100, 500);
  EXPECT_EQ(backlog.Of(0, Space(1)).tokens, 600u);
  clock.Advance(10 * kBacklogSecond);
  EXPECT_EQ(backlog.Of(0, Space(1)).tokens, 0u);
  EXPECT_EQ(backlog.Of(0, Space(1)).engines, 1u);
}

TEST(PrefillBacklog, WaitIsThatOfTheEngineThatIsFreeFirst) {
  storage::ManualClock clock;
  PrefillBacklog backlog(clock);
  backlog.Add(1, 0, Space(1), 1000, 500);
  backlog.Add(2, 0, Space(1), 300, 100);
  EXPECT_EQ(backlog.Of(0, Space(1)).tokens, 1300u);
  EXPECT_EQ(backlog.Of(0, Space(1)).wait, 2 * kBacklogSecond);
  EXPECT_EQ(backlog.Of(0, Space(1)).engines, 2u);
  backlog.SessionEnded(1);
  EXPECT_EQ(backlog.Of(0, Space(1)).wait, 3 * kBacklogSecond);
}

TEST(PrefillBacklog, KeepsTenantsAndModelsApart) {
  storage::ManualClock clock;
  PrefillBacklog backlog(clock);
  backlog.Add(1, 0, Space(1), 1000, 500);
  EXPECT_EQ(backlog.Of(1, Space(1)).tokens, 0u);
  EXPECT_EQ(backlog.Of(0, Space(2)).tokens, 0u);
}

}  // namespace
}  // namespace ashlar::daemon
