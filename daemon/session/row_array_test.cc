// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/row_array.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <optional>
#include <random>
#include <vector>

namespace ashlar::daemon {
namespace {

// Compares byte by byte.
bool ReallyOverlap(const RowArray& a, const RowArray& b) {
  std::vector<bool> taken(static_cast<size_t>(std::max(a.End(), b.End())));
  const auto each_byte = [](const RowArray& array, auto visit) {
    const auto& [pages, tokens, heads] = array.dimensions;
    for (uint64_t p = 0; p < pages.count; ++p)
      for (uint64_t t = 0; t < tokens.count; ++t)
        for (uint64_t h = 0; h < heads.count; ++h)
          for (uint64_t i = 0; i < array.row_bytes; ++i)
            visit(array.offset + p * pages.stride + t * tokens.stride + h * heads.stride + i);
  };
  bool overlap = false;
  each_byte(a, [&](uint64_t at) { taken[at] = true; });
  each_byte(b, [&](uint64_t at) { overlap |= taken[at]; });
  return overlap;
}

class RowArrays : public ::testing::Test {
 protected:
  uint64_t Draw(uint64_t first, uint64_t last) { return std::uniform_int_distribution<uint64_t>(first, last)(random_); }

  // Compares FindOverlap with Overlap of every pair, and counts the arrays that overlap.
  static void SearchAsTwoByTwo(const std::vector<RowArray>& arrays, int& overlapping) {
    bool expected = false;
    for (size_t i = 0; i < arrays.size(); ++i) {
      for (size_t j = 0; j < i; ++j) expected |= Overlap(arrays[i], arrays[j]);
    }
    const auto found = FindOverlap(arrays);
    ASSERT_EQ(found.has_value(), expected);
    if (!found) return;
    ++overlapping;
    ASSERT_NE(found->first, found->second);
    ASSERT_TRUE(Overlap(arrays[found->first], arrays[found->second]));
  }

  const uint64_t seed_ = std::random_device()();
  std::mt19937_64 random_{seed_};
};

TEST_F(RowArrays, PlanesWithEqualStridesAreComparedExactly) {
  SCOPED_TRACE(seed_);
  int overlapping = 0;
  constexpr int kRounds = 4000;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t row = Draw(1, 6);
    const uint64_t head = row + Draw(0, 12), token = 3 * head + Draw(0, 30), page = 3 * token + Draw(0, 60);
    const auto draw = [&] {
      return RowArray{Draw(0, page), Draw(1, row), {{{page, Draw(1, 3)}, {token, Draw(1, 3)}, {head, Draw(1, 3)}}}};
    };
    const RowArray a = draw(), b = draw();
    ASSERT_TRUE(a.Disjoint() && b.Disjoint());
    const bool expected = ReallyOverlap(a, b);
    overlapping += expected;
    ASSERT_EQ(Overlap(a, b), expected) << round;
    ASSERT_EQ(Overlap(b, a), expected) << round;
  }
  EXPECT_GT(overlapping, kRounds / 20);
  EXPECT_LT(overlapping, kRounds * 19 / 20);
}

TEST_F(RowArrays, FindsAnOverlapAmongMany) {
  SCOPED_TRACE(seed_);
  int overlapping = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<RowArray> arrays(Draw(0, 6));
    for (RowArray& array : arrays) {
      array = {Draw(0, 400), Draw(1, 4), {{{100, Draw(1, 3)}, {20, Draw(1, 3)}, {5, Draw(1, 3)}}}};
    }
    ASSERT_NO_FATAL_FAILURE(SearchAsTwoByTwo(arrays, overlapping)) << round;
  }
  EXPECT_GT(overlapping, 100);
  EXPECT_LT(overlapping, 1900);
}

// Steps of all kinds, equal ones and others, in ranges that are adjacent, disjoint, or begin some strides later.
TEST_F(RowArrays, SearchingManyMatchesComparingPairs) {
  SCOPED_TRACE(seed_);
  int overlapping = 0;
  constexpr int kRounds = 20000;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t row = Draw(1, 4), head = row * Draw(1, 4), token = head * Draw(1, 12), page = token * Draw(1, 12);
    const uint64_t strides[] = {head, token, page, page + Draw(0, 3)};
    std::vector<RowArray> arrays(Draw(2, 7));
    for (RowArray& array : arrays) {
      do {
        array = {Draw(0, 3 * page), Draw(1, row), {}};
        for (auto& dimension : array.dimensions) dimension = {strides[Draw(0, 3)], Draw(1, 3)};
      } while (!array.Disjoint());
    }
    ASSERT_NO_FATAL_FAILURE(SearchAsTwoByTwo(arrays, overlapping)) << round;
  }
  EXPECT_GT(overlapping, kRounds / 20);
  EXPECT_LT(overlapping, kRounds * 19 / 20);
}

// All keys and values of each token are adjacent: every plane's range meets every other's.
std::vector<RowArray> Interleaved(uint64_t planes) {
  constexpr uint64_t kRow = 256, kHeads = 4, kTokens = 16, kPages = 1 << 12;
  const uint64_t token = planes * kHeads * kRow, page = kTokens * token;
  std::vector<RowArray> arrays;
  for (uint64_t plane = 0; plane < planes; ++plane) {
    // Heads of a plane side by side, or the planes' heads alternating.
    const bool turns = plane % 2 == 1;
    const uint64_t offset = (plane - (turns ? 1 : 0)) * kHeads * kRow + (turns ? kRow : 0);
    arrays.push_back({offset, kRow, {{{page, kPages}, {token, kTokens}, {2 * kRow, kHeads}}}});
  }
  return arrays;
}

TEST_F(RowArrays, FindsOverlapAmongThousands) {
  SCOPED_TRACE(seed_);
  std::vector<RowArray> arrays = Interleaved(4096);
  std::ranges::shuffle(arrays, random_);
  ASSERT_EQ(FindOverlap(arrays), std::nullopt);
  const size_t which = Draw(0, arrays.size() - 1);
  arrays[which].offset += 4;
  const auto found = FindOverlap(arrays);
  ASSERT_TRUE(found.has_value());
  EXPECT_TRUE(found->first == which || found->second == which);
  EXPECT_TRUE(Overlap(arrays[found->first], arrays[found->second]));
}

// A request is checked on a thread that others need as well.
TEST_F(RowArrays, TimeGrowsLessThanQuadratically) {
  const auto time = [](uint64_t planes) {
    const std::vector<RowArray> arrays = Interleaved(planes);
    int64_t least = INT64_MAX;
    for (int run = 0; run < 3; ++run) {
      timespec begin, end;
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
      EXPECT_EQ(FindOverlap(arrays), std::nullopt);
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
      least = std::min<int64_t>(least, (end.tv_sec - begin.tv_sec) * 1'000'000'000 + end.tv_nsec - begin.tv_nsec);
    }
    return least;
  };
  EXPECT_LT(time(8192), 80 * time(512));  // it would be 256 times if the cost were quadratic
}

// Each stride is a little larger than the previous one: only pairwise comparison separates the planes, and that is
// bounded.
TEST_F(RowArrays, PairwiseComparisonsAreBounded) {
  constexpr uint64_t kMany = 4096;
  std::vector<RowArray> arrays;
  for (uint64_t i = 0; i < kMany; ++i) {
    arrays.push_back({i * 32, 4, {{{kMany * 64 + 8 * i, 2}, {0, 1}, {0, 1}}}});
  }
  EXPECT_EQ(FindOverlap(std::span(arrays).first(30)), std::nullopt);
  EXPECT_TRUE(FindOverlap(arrays).has_value());
}

TEST_F(RowArrays, FindsOverlapsForAnyStrides) {
  SCOPED_TRACE(seed_);
  int apart = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto draw = [&] {
      for (;;) {
        RowArray array{Draw(0, 300), Draw(1, 16), {}};
        for (auto& dimension : array.dimensions) dimension = {Draw(0, 120), Draw(1, 4)};
        if (array.Disjoint()) return array;
      }
    };
    const RowArray a = draw(), b = draw();
    const bool overlap = Overlap(a, b);
    ASSERT_EQ(Overlap(b, a), overlap) << round;
    if (overlap) continue;
    ++apart;
    ASSERT_FALSE(ReallyOverlap(a, b)) << round;
  }
  EXPECT_GT(apart, 100);
}

TEST_F(RowArrays, PlanesWithinATokenWithinAPageAndBesideEachOther) {
  constexpr uint64_t kRow = 512, kHeads = 8, kTokens = 16, kPages = 1 << 20;
  constexpr uint64_t kToken = 2 * kHeads * kRow, kPage = 3 * kTokens * kToken;  // three layers per page
  const auto plane = [](uint64_t offset, uint64_t row) {
    return RowArray{offset, row, {{{kPage, kPages}, {kToken, kTokens}, {kRow, kHeads}}}};
  };
  const RowArray keys = plane(0, kRow);
  EXPECT_FALSE(Overlap(keys, plane(kHeads * kRow, kRow))) << "values behind the keys of each token";
  EXPECT_FALSE(Overlap(keys, plane(kTokens * kToken, kRow))) << "the next layer of each page";
  EXPECT_FALSE(Overlap(keys, plane(kPages * kPage, kRow))) << "behind the last page";
  EXPECT_TRUE(Overlap(keys, keys));
  EXPECT_TRUE(Overlap(keys, plane(kHeads * kRow - 4, kRow))) << "into the last head of each token";
  EXPECT_TRUE(Overlap(keys, plane(2 * kTokens * kToken + kHeads * kRow + 4, kRow))) << "out of one page into the next";
  EXPECT_TRUE(Overlap(keys, plane((kPages - 1) * kPage + 4, kRow))) << "the last page alone";
  EXPECT_FALSE(Overlap(plane(0, kRow / 2), plane(kRow / 2, kRow / 2))) << "keys and values in one head's row";
}

}  // namespace
}  // namespace ashlar::daemon
