// SPDX-License-Identifier: Apache-2.0
#include "storage/history/miss_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<Nanos> Last(const MissLog& log, TenantId tenant, size_t most) {
  std::vector<Nanos> times;
  for (const Miss& miss : log.Last(tenant, most)) times.push_back(miss.at);
  return times;
}

TEST(MissLog, ListsNewestFirstAndDropsOldest) {
  MissLog log(3);
  EXPECT_THAT(Last(log, 1, 5), IsEmpty());
  log.Add(1, {.at = 1});
  log.Add(1, {.at = 2});
  EXPECT_THAT(Last(log, 1, 5), ElementsAre(2, 1));
  for (const Nanos at : {3, 4, 5}) log.Add(1, {.at = at});
  EXPECT_THAT(Last(log, 1, 5), ElementsAre(5, 4, 3));
  EXPECT_THAT(Last(log, 1, 2), ElementsAre(5, 4));
  EXPECT_THAT(Last(log, 2, 5), IsEmpty()) << "another tenant's";
}

TEST(MissLog, ZeroCapacityKeepsNothing) {
  MissLog log(0);
  log.Add(1, {.at = 1});
  EXPECT_THAT(log.Last(1, 5), IsEmpty());
}

}  // namespace
}  // namespace ashlar::storage
