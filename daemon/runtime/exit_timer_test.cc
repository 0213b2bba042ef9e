// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/exit_timer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace ashlar::daemon {
namespace {

constexpr std::chrono::milliseconds kSoon(20);

TEST(ExitTimerDeathTest, EndsAHungProcess) {
  EXPECT_EXIT(
      {
        ExitTimer::Start(kSoon, 3, "too slow\n");
        for (;;) pause();
      },
      ::testing::ExitedWithCode(3), "too slow");
}

TEST(ExitTimerDeathTest, AFullPipeDoesNotDelayTheExit) {
  EXPECT_EXIT(
      {
        int ends[2];
        if (pipe2(ends, O_NONBLOCK) != 0) _exit(1);
        const char bytes[4096] = {};
        while (write(ends[1], bytes, sizeof bytes) > 0) {
        }
        fcntl(ends[1], F_SETFL, 0);
        dup2(ends[1], STDERR_FILENO);
        ExitTimer::Start(kSoon, 3, "too slow\n");
        for (;;) pause();
      },
      ::testing::ExitedWithCode(3), "");
}

TEST(ExitTimerDeathTest, CancelKeepsTheProcess) {
  EXPECT_EXIT(
      {
        ExitTimer::Start(kSoon, 3, "");
        ExitTimer::Cancel();
        std::this_thread::sleep_for(3 * kSoon);
        _exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace ashlar::daemon
