// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/prefill_time.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ashlar::replay {
namespace {

TEST(PrefillTimeTest, InterpolatesMeasuredTimes) {
  const auto time = PrefillTime::Parse({"1000:1000", "3000:1500"});  // 1 s and 2 s
  ASSERT_TRUE(time.ok()) << time.status();
  EXPECT_DOUBLE_EQ(time->Seconds(0, 500), 0.5);
  EXPECT_DOUBLE_EQ(time->Seconds(0, 2000), 1.5);
  EXPECT_DOUBLE_EQ(time->Seconds(1000, 3000), 1);
  EXPECT_DOUBLE_EQ(time->Seconds(0, 6000), 4) << "at the rate of the longest";
  EXPECT_DOUBLE_EQ(time->TokensPerSecond(3000), 1500);
}

TEST(PrefillTimeTest, FollowsTheModelWithoutATable) {
  const auto model = FindModel("marconi-7b");
  ASSERT_TRUE(model.ok());
  const PrefillTime time(*model);
  EXPECT_DOUBLE_EQ(time.Seconds(0, 1000), model->costs.Flops(1000) / model->flops_per_second);
  EXPECT_GT(time.Seconds(1000, 2000), time.Seconds(0, 1000)) << "attention is quadratic";
}

TEST(PrefillTimeTest, RefusesWrongTables) {
  for (const char* const row : {"", "1000", ":5", "0:5", "1000:0", "1000:-1", "1000:inf", "1000:nan", "a:b", "1:2:3"}) {
    const auto time = PrefillTime::Parse({row});
    ASSERT_FALSE(time.ok()) << row;
    EXPECT_THAT(std::string(time.status().message()), testing::StartsWith("--prefill-rate: "));
  }
  EXPECT_FALSE(PrefillTime::Parse({"1000:1000", "2000:4000"}).ok()) << "2,000 tokens would take half the time of 1,000";
}

}  // namespace
}  // namespace ashlar::replay
