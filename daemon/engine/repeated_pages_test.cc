// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/repeated_pages.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace ashlar::daemon {
namespace {

TEST(RepeatedPages, ClaimingOnePageThroughTwoEntriesIsAConflict) {
  RepeatedPages pages(std::vector<int32_t>{4, 0, 7, 4, -1, -1, 0, 0});
  EXPECT_FALSE(pages.Claim(0, 3)) << "each page once";
  EXPECT_FALSE(pages.Claim(2, 3)) << "the same entry again";
  EXPECT_FALSE(pages.Claim(4, 6)) << "entries that name no page";
  const auto padding = pages.Claim(5, 8);
  ASSERT_TRUE(padding);
  EXPECT_EQ(padding->entry, 6u);
  EXPECT_EQ(padding->earlier, 1u);
  const auto behind = pages.Claim(3, 4);
  ASSERT_TRUE(behind);
  EXPECT_EQ(behind->entry, 3u);
  EXPECT_EQ(behind->earlier, 0u);
  EXPECT_FALSE(RepeatedPages().Claim(0, 100));
}

TEST(RepeatedPages, MatchesAMapOfClaims) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto draw = [&](int first, int last) { return std::uniform_int_distribution<int>(first, last)(random); };
  for (int round = 0; round < 500; ++round) {
    std::vector<int32_t> table(draw(0, 40));
    for (int32_t& page : table) page = draw(-1, 100);
    RepeatedPages pages(table);
    std::map<int32_t, uint64_t> claimed;
    for (int claim = 0; claim < 5; ++claim) {
      const int first = draw(0, static_cast<int>(table.size())), last = draw(first, static_cast<int>(table.size()));
      std::optional<uint64_t> expected;
      for (int i = first; i < last && !expected; ++i) {
        if (table[i] < 0) continue;
        if (claimed.emplace(table[i], i).first->second != static_cast<uint64_t>(i)) expected = i;
      }
      const auto conflict = pages.Claim(first, last);
      ASSERT_EQ(conflict.has_value(), expected.has_value());
      if (!conflict) continue;
      EXPECT_EQ(conflict->entry, *expected);
      EXPECT_EQ(conflict->earlier, claimed[table[*expected]]);
    }
  }
}

}  // namespace
}  // namespace ashlar::daemon
