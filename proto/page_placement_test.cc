// SPDX-License-Identifier: Apache-2.0
#include "proto/page_placement.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace ashlar {
namespace {

TEST(PagePlacement, RecomputesTheFirstPageOfAChunkOfWholePages) {
  const Layout layout{.page_tokens = 16, .head = 16, .tail = 0};
  const PagePlacement placement = PlaceInPages(layout, ObjectKind::kSegment, 512, 16);
  EXPECT_EQ(placement.first_slot, 0u);
  EXPECT_EQ(placement.first_page, 1u);
  EXPECT_EQ(placement.shared_pages, 31u);
  EXPECT_EQ(placement.first_token, 16u);
  EXPECT_EQ(placement.end_token, 512u);
}

TEST(PagePlacement, PadsSegmentsAtTheFrontAndPrefixesAtTheEnd) {
  const Layout layout{.page_tokens = 16, .head = 4, .tail = 4};
  const PagePlacement segment = PlaceInPages(layout, ObjectKind::kSegment, 35, 16);
  EXPECT_EQ(segment.first_slot, 13u);  // 48 − 35: the last token ends the last page
  EXPECT_EQ(segment.first_page, 1u);   // token 4 is at slot 17
  EXPECT_EQ(segment.shared_pages, 2u);
  const PagePlacement prefix = PlaceInPages(layout, ObjectKind::kCheckpoint, 35, 16);
  EXPECT_EQ(prefix.first_slot, 0u);
  EXPECT_EQ(prefix.first_page, 0u);
  EXPECT_EQ(prefix.shared_pages, 3u);
  EXPECT_EQ(prefix.end_token, 35u);
}

TEST(PagePlacement, SharesNothingWithoutAnInterior) {
  const Layout layout{.page_tokens = 16, .head = 4, .tail = 4};
  EXPECT_EQ(PlaceInPages(layout, ObjectKind::kSegment, 8, 16).shared_pages, 0u);
  EXPECT_EQ(PlaceInPages(layout, ObjectKind::kSegment, 9, 16).shared_pages, 1u);
  EXPECT_EQ(PlaceInPages(layout, ObjectKind::kCheckpoint, 0, 16).shared_pages, 0u);
}

// Page by page, token by token.
TEST(PagePlacement, SharesExactlyThePagesThatHoldInteriorTokens) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto below = [&](uint32_t limit) { return static_cast<uint32_t>(random() % limit); };
  for (int round = 0; round < 2000; ++round) {
    const Layout layout{.page_tokens = 16, .head = below(40), .tail = below(40)};
    const uint32_t page_tokens = 1 + below(32);
    const uint64_t tokens = 1 + below(300);
    const ObjectKind kind = below(2) == 0 ? ObjectKind::kSegment : ObjectKind::kCheckpoint;
    const bool whole = kind == ObjectKind::kCheckpoint;
    const PagePlacement placement = PlaceInPages(layout, kind, tokens, page_tokens);
    const uint64_t pages = (tokens + page_tokens - 1) / page_tokens;
    std::set<uint64_t> expected;
    for (uint64_t token = 0; token < tokens; ++token) {
      const bool interior = whole || (token >= layout.head && token + layout.tail < tokens);
      const uint64_t slot = whole ? token : pages * page_tokens - tokens + token;
      if (!interior) continue;
      expected.insert(slot / page_tokens);
      EXPECT_EQ(placement.first_slot + token, slot);
      EXPECT_TRUE(token >= placement.first_token && token < placement.end_token);
    }
    ASSERT_EQ(placement.shared_pages, expected.size());
    if (expected.empty()) continue;
    EXPECT_EQ(placement.first_page, *expected.begin());
    EXPECT_EQ(placement.end_token - placement.first_token, whole ? tokens : tokens - layout.head - layout.tail);
  }
}

}  // namespace
}  // namespace ashlar
