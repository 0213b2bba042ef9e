// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/cover.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

double TokensAt(uint64_t depth) {
  return static_cast<double>(depth);
}

TEST(CoverTest, APrefixThatInvalidatesABetterHitIsNotTaken) {
  const CoverSegment segments[] = {{0, 100, false}, {100, 400, true}, {400, 500, true}};
  const uint64_t resumable[] = {100, 150};
  const Cover cover = BestCover(resumable, segments, 0, 0, TokensAt);
  EXPECT_EQ(cover.prefix, 100u);
  EXPECT_THAT(cover.segments, ElementsAre(1, 2));
  EXPECT_EQ(cover.saved, 500);
}

TEST(CoverTest, ALongPrefixIsTakenWhereItSavesMore) {
  const CoverSegment segments[] = {{0, 100, false}, {100, 400, true}, {400, 500, false}};
  const uint64_t resumable[] = {450};
  const Cover cover = BestCover(resumable, segments, 0, 0, TokensAt);
  EXPECT_EQ(cover.prefix, 450u);
  EXPECT_THAT(cover.segments, IsEmpty());
}

TEST(CoverTest, SeamsAreComputedExceptBesideAPrefix) {
  const CoverSegment segments[] = {{0, 100, true}, {100, 200, true}, {200, 216, true}};
  const Cover cover = BestCover({}, segments, 8, 8, TokensAt);
  EXPECT_EQ(cover.prefix, 100u) << "the segment that the prompt begins with has no seams";
  EXPECT_THAT(cover.segments, ElementsAre(1)) << "the last one is all seam";
  EXPECT_EQ(cover.saved, 100 + 84);
}

TEST(CoverTest, APrefixMayEndInAHeadSeam) {
  const CoverSegment segments[] = {{0, 100, false}, {100, 200, true}, {200, 300, true}};
  for (const auto& [depth, interiors] : {std::pair{100, 2}, {104, 2}, {108, 2}, {109, 1}, {192, 1}, {208, 1}}) {
    const uint64_t resumable[] = {static_cast<uint64_t>(depth)};
    const Cover cover = BestCover(resumable, segments, 8, 8, TokensAt);
    EXPECT_EQ(cover.prefix, resumable[0]);
    EXPECT_EQ(cover.saved, depth + interiors * 84) << depth;
  }
}

TEST(CoverTest, EmptyInputGivesEmptyCover) {
  const Cover cover = BestCover({}, {}, 8, 8, TokensAt);
  EXPECT_EQ(cover.prefix, 0u);
  EXPECT_EQ(cover.saved, 0);
}

// Compares with all possible covers.
TEST(CoverTest, NoCoverSavesMore) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto cost = [](uint64_t depth) { return static_cast<double>(depth) * (3 + static_cast<double>(depth) * 0.01); };
  for (int round = 0; round < 500; ++round) {
    std::vector<CoverSegment> segments;
    uint64_t at = random() % 2 * (random() % 30);
    for (size_t i = 0; i < random() % 7; ++i) {
      const uint64_t end = at + 1 + random() % 60;
      segments.push_back({at, end, random() % 2 == 0});
      at = end + random() % 2 * (random() % 20);
    }
    std::vector<uint64_t> resumable;
    for (uint64_t depth = 1; depth <= at; ++depth) {
      if (random() % 40 == 0) resumable.push_back(depth);
    }
    const uint64_t head = random() % 9, tail = random() % 9;
    double most = 0;
    std::vector<uint64_t> prefixes = resumable;
    prefixes.push_back(0);
    if (!segments.empty() && segments[0].begin == 0 && segments[0].hit) prefixes.push_back(segments[0].end);
    for (const uint64_t prefix : prefixes) {
      double saved = cost(prefix);
      for (const CoverSegment& segment : segments) {
        if (!segment.hit || segment.begin + head < prefix || segment.begin == 0) continue;
        for (uint64_t token = segment.begin + head; token + tail < segment.end; ++token)
          saved += cost(token + 1) - cost(token);
      }
      most = std::max(most, saved);
    }
    const Cover cover = BestCover(resumable, segments, head, tail, cost);
    EXPECT_NEAR(cover.saved, most, 1e-6 * (1 + most)) << "round " << round;
  }
}

}  // namespace
}  // namespace ashlar::storage
