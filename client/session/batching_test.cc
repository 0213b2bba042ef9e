// SPDX-License-Identifier: Apache-2.0
#include "client/session/batching.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace ashlar::internal {
namespace {

using testing::ElementsAre;

// Items are their own loads; every call's size is written down.
class Batching : public testing::Test {
 protected:
  std::vector<int> Ask(const std::vector<Load>& loads, size_t most) {
    std::vector<size_t> items(loads.size());
    std::iota(items.begin(), items.end(), 0);
    return AskInCalls<int>(
        std::span<const size_t>(items), most, [&](size_t item) { return loads[item]; },
        [&](std::span<const size_t> part) -> absl::StatusOr<std::vector<int>> {
          calls_.push_back(part.size());
          for (size_t item : part) {
            if (item == bad_) return absl::InvalidArgumentError("bad");
            if (item == lost_) return absl::UnavailableError("lost");
          }
          return std::vector<int>(part.begin(), part.end());
        },
        [](size_t, const absl::Status& status) { return absl::IsInvalidArgument(status) ? -1 : -2; });
  }

  static constexpr size_t kNone = 1000;
  size_t bad_ = kNone, lost_ = kNone;
  std::vector<size_t> calls_;
};

TEST_F(Batching, CutsByNumberBytesAndLookups) {
  EXPECT_THAT(Ask({}, 2), ElementsAre());
  EXPECT_THAT(calls_, ElementsAre());
  EXPECT_THAT(Ask(std::vector<Load>(5), 2), ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(calls_, ElementsAre(2, 2, 1));

  calls_.clear();
  constexpr size_t kHalf = limits::kMaxRequestBytes / 2;  // two of these leave no space for anything else
  EXPECT_THAT(Ask({{kHalf}, {kHalf}, {kHalf}, {1}}, 64), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(calls_, ElementsAre(1, 1, 2));

  calls_.clear();
  constexpr uint64_t kMost = limits::kMaxLookupsPerMatch;
  EXPECT_THAT(Ask({{0, kMost / 2}, {0, kMost / 2}, {0, 1}, {0, kMost}}, 64), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(calls_, ElementsAre(2, 1, 1));

  calls_.clear();
  EXPECT_THAT(Ask({{1}, {2 * limits::kMaxRequestBytes}, {1}}, 64), ElementsAre(0, 1, 2)) << "asked all the same";
  EXPECT_THAT(calls_, ElementsAre(1, 1, 1));
}

TEST_F(Batching, OneBadItemDoesNotFailTheOthers) {
  bad_ = 1;
  EXPECT_THAT(Ask(std::vector<Load>(4), 3), ElementsAre(0, -1, 2, 3));
  EXPECT_THAT(calls_, ElementsAre(3, 1, 1, 1, 1));
}

TEST_F(Batching, OtherFailuresFailTheWholeCall) {
  lost_ = 1;
  EXPECT_THAT(Ask(std::vector<Load>(4), 3), ElementsAre(-2, -2, -2, 3));
  EXPECT_THAT(calls_, ElementsAre(3, 1));
}

}  // namespace
}  // namespace ashlar::internal
