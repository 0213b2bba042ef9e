// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/call_memory.h"

#include <gtest/gtest.h>

namespace ashlar::daemon {
namespace {

constexpr CallMemory::Bounds kBounds = {.requests = 100, .before_a_call = 10, .before_an_answer = 40};

TEST(CallMemory, SingleLargeRequestIsServed) {
  CallMemory memory(kBounds);
  EXPECT_TRUE(memory.HoldRequest(1000));
  EXPECT_FALSE(memory.HoldRequest(1)) << "the memory is in use";
  memory.EndRequest(1000);
  EXPECT_TRUE(memory.HoldRequest(60));
  EXPECT_TRUE(memory.HoldRequest(40));
  EXPECT_FALSE(memory.HoldRequest(1));
  memory.EndRequest(40);
  EXPECT_TRUE(memory.HoldRequest(40)) << "what was refused did not count";
}

TEST(CallMemory, UnreadAnswersStopCallsFirstAndAnswersLater) {
  CallMemory memory(kBounds);
  EXPECT_TRUE(memory.HoldAnswer(10));
  EXPECT_TRUE(memory.MayBegin());
  EXPECT_TRUE(memory.HoldAnswer(1));
  EXPECT_FALSE(memory.MayBegin());
  EXPECT_TRUE(memory.HoldAnswer(29)) << "of a call that was begun before";
  EXPECT_FALSE(memory.HoldAnswer(1));
  memory.EndAnswer(29);
  EXPECT_TRUE(memory.HoldAnswer(29)) << "what was not sent did not count";
  EXPECT_FALSE(memory.MayBegin());
  memory.EndAnswer(29);
  memory.EndAnswer(1);
  EXPECT_TRUE(memory.MayBegin());
}

TEST(CallMemory, RequestsAndAnswersHaveSeparateBudgets) {
  CallMemory memory(kBounds);
  EXPECT_TRUE(memory.HoldRequest(100));
  EXPECT_TRUE(memory.MayBegin());
  EXPECT_TRUE(memory.HoldAnswer(40));
}

}  // namespace
}  // namespace ashlar::daemon
