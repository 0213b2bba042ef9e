// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ashlar/client.h"

namespace ashlar {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(SplitBySeparator, CutsTextAndDropsEmptyPieces) {
  EXPECT_THAT(SplitBySeparator("instructions<|pic|>one<|pic|><|pic|>two<|pic|>"),
              ElementsAre("instructions", "one", "two"));
  EXPECT_THAT(SplitBySeparator("<|pic|>one"), ElementsAre("one"));
  EXPECT_THAT(SplitBySeparator("a##b", "##"), ElementsAre("a", "b"));
}

TEST(SplitBySeparator, TextWithoutSeparatorIsOnePiece) {
  EXPECT_THAT(SplitBySeparator("all of it"), ElementsAre("all of it"));
  EXPECT_THAT(SplitBySeparator("no separator to look for", ""), ElementsAre("no separator to look for"));
  EXPECT_THAT(SplitBySeparator(""), IsEmpty());
  EXPECT_THAT(SplitBySeparator("<|pic|>"), IsEmpty());
}

TEST(SplitBySeparator, PartOfASeparatorIsText) {
  EXPECT_THAT(SplitBySeparator("a<|pic|b<|pic|>c<|pi"), ElementsAre("a<|pic|b", "c<|pi"));
}

TEST(SplitBySeparator, CutsTokensAndRemovesSeparators) {
  std::vector<int32_t> tokens = {-1, 5, 6, -1, -1, 7, 8, 9, -1};
  EXPECT_THAT(SplitBySeparator(tokens, -1), ElementsAre(2, 3));
  EXPECT_THAT(tokens, ElementsAre(5, 6, 7, 8, 9));
}

TEST(SplitBySeparator, TokensWithoutSeparatorAreOneRun) {
  std::vector<int32_t> tokens = {5, 6};
  EXPECT_THAT(SplitBySeparator(tokens, 0), ElementsAre(2));
  EXPECT_THAT(tokens, ElementsAre(5, 6));
  tokens = {0, 0};
  EXPECT_THAT(SplitBySeparator(tokens, 0), IsEmpty());
  EXPECT_THAT(tokens, IsEmpty());
}

}  // namespace
}  // namespace ashlar
