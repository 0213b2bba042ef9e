// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/schedule.h"

#include <gtest/gtest.h>

#include <thread>

namespace ashlar::replay {
namespace {

TEST(ScheduleTest, RequestsArriveInOrderAtTheRate) {
  const std::vector<uint64_t> sessions = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const auto start = Schedule::Clock::now();
  Schedule schedule(sessions, 1000);
  for (size_t i = 0; i < sessions.size(); ++i) {
    const auto next = schedule.Next();
    ASSERT_TRUE(next.has_value());
    EXPECT_EQ(next->request, i);
    EXPECT_GE(Schedule::Clock::now(), next->at);
    EXPECT_GT(next->at, start);
    EXPECT_LT(next->at - start, std::chrono::milliseconds(100)) << "ten gaps of 1 ms on average";
  }
  EXPECT_FALSE(schedule.Next().has_value());
}

TEST(ScheduleTest, NextTurnArrivesWhenThePreviousOneHasEnded) {
  const std::vector<uint64_t> sessions = {7, 7, 8};
  Schedule schedule(sessions, 1e6);
  EXPECT_EQ(schedule.Next()->request, 0u);
  EXPECT_EQ(schedule.Next()->request, 2u) << "the second turn of session 7 waits";
  Schedule::Clock::time_point ended;
  std::thread engine([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ended = Schedule::Clock::now();
    schedule.Ended(0);
  });
  const auto turn = schedule.Next();
  engine.join();
  ASSERT_TRUE(turn.has_value());
  EXPECT_EQ(turn->request, 1u);
  EXPECT_GE(turn->at, ended) << "its time to first token counts from there";
}

TEST(ScheduleTest, StopEndsAWait) {
  const std::vector<uint64_t> sessions = {0, 0};
  Schedule schedule(sessions, 1e6);
  ASSERT_TRUE(schedule.Next().has_value());
  std::thread other([&] { schedule.Stop(); });
  EXPECT_FALSE(schedule.Next().has_value());
  other.join();
}

}  // namespace
}  // namespace ashlar::replay
