// SPDX-License-Identifier: Apache-2.0
#include "client/engine/boundary.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <limits>
#include <new>
#include <system_error>
#include <vector>

namespace ashlar::engine {
namespace {

TEST(Boundary, ExceptionsBecomeStatuses) {
  const Status memory = Guarded([]() -> Status { throw std::bad_alloc(); });
  EXPECT_EQ(memory.code, Code::kResourceExhausted);
  EXPECT_STRNE(memory.message, "");
  const Status thread = Guarded([]() -> Status { throw std::system_error(EAGAIN, std::generic_category()); });
  EXPECT_EQ(thread.code, Code::kResourceExhausted);
  const Status length = Guarded([]() -> Status {
    const std::vector<int32_t> pages(std::numeric_limits<size_t>::max() / 2);
    return {};
  });
  EXPECT_EQ(length.code, Code::kResourceExhausted);
}

TEST(Boundary, PassesAnswersUnchanged) {
  EXPECT_EQ(Guarded([] { return Invalid("layer: 7"); }).code, Code::kInvalidArgument);
  EXPECT_EQ(GuardedOr(0, [] { return 7; }), 7);
  EXPECT_EQ(GuardedOr(9, []() -> int { throw std::bad_alloc(); }), 9);
}

TEST(Boundary, WorkThatThrowsRunsItsFallback) {
  int ended = 0;
  RunOr([] {}, [&] { ++ended; });
  EXPECT_EQ(ended, 0);
  RunOr([] { throw std::bad_alloc(); }, [&] { ++ended; });
  EXPECT_EQ(ended, 1);
}

}  // namespace
}  // namespace ashlar::engine
