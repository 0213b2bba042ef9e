// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/prefix_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "proto/key.h"
#include "storage/testing/tokens.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;

constexpr uint64_t kPageTokens = 2;

Key KeyOf(uint8_t byte) {
  Key key{};
  key.bytes[0] = byte;
  return key;
}

std::vector<int> BlocksOf(const PrefixNode& node) {
  std::vector<int> blocks;
  if (node.data.stored == nullptr) return blocks;
  for (const Key& key : node.data.stored->blocks) blocks.push_back(key.bytes[0]);
  return blocks;
}

TEST(PrefixHistoryTest, OldestIsTheLeafVisitedLongestAgo) {
  PrefixHistory history(kPageTokens);
  EXPECT_EQ(history.oldest(), nullptr);
  PrefixNode* const first = history.Extend(Tokens{1, 2, 3}, 3, {}, 1).node;
  PrefixNode* const second = history.Extend(Tokens{4, 5}, 2, {}, 2).node;
  EXPECT_EQ(history.oldest(), first);
  history.Visit(*first, 3);
  EXPECT_EQ(history.oldest(), second);
}

TEST(PrefixHistoryTest, AParentOfALongerTextIsNoLeaf) {
  PrefixHistory history(kPageTokens);
  PrefixNode* const shorter = history.Extend(Tokens{1, 2}, 2, {}, 1).node;
  PrefixNode* const longer = history.Extend(Tokens{1, 2, 3}, 3, {}, 2).node;
  shorter->data.kind = ReuseKind::kRequestEnd;
  EXPECT_EQ(history.oldest(), longer);
  history.Erase(*longer);
  EXPECT_EQ(history.oldest(), shorter);
  history.Erase(*shorter);
  EXPECT_EQ(history.oldest(), nullptr);
  EXPECT_EQ(history.size(), 0u);
}

TEST(PrefixHistoryTest, EraseJoinsAParentWhereNothingResumes) {
  PrefixHistory history(kPageTokens);
  PrefixNode* const stays = history.Extend(Tokens{1, 2, 3, 4}, 4, {}, 1).node;
  PrefixNode* const erased = history.Extend(Tokens{1, 2, 5}, 3, {}, 2).node;
  ASSERT_EQ(history.size(), 3u);
  history.Erase(*erased);
  ASSERT_EQ(history.size(), 1u);
  EXPECT_EQ(&history[0], stays);
  EXPECT_EQ(stays->begin(), 0u);
}

TEST(PrefixHistoryTest, EraseKeepsAParentWhereAPromptResumes) {
  PrefixHistory history(kPageTokens);
  history.Extend(Tokens{1, 2, 3, 4}, 4, {}, 1);
  PrefixNode* const erased = history.Extend(Tokens{1, 2, 5}, 3, {}, 2).node;
  history.NodeAt(Tokens{1, 2}).data.kind = ReuseKind::kBranch;
  history.Erase(*erased);
  EXPECT_EQ(history.size(), 2u);
}

TEST(PrefixHistoryTest, BlockKeysStayWithTheirTokens) {
  PrefixHistory history(kPageTokens);
  PrefixNode& whole = *history.Extend(Tokens{1, 2, 3, 4, 5, 6}, 6, {}, 1).node;
  whole.data.stored = std::make_unique<StoredKeys>();
  whole.data.stored->blocks = {KeyOf(1), KeyOf(2), KeyOf(3)};
  PrefixNode& branch = *history.Extend(Tokens{1, 2, 3, 4, 9}, 5, {}, 2).node;
  EXPECT_THAT(BlocksOf(*branch.parent()), ElementsAre(1, 2));
  EXPECT_THAT(BlocksOf(whole), ElementsAre(3));
  history.Erase(branch);
  EXPECT_THAT(BlocksOf(whole), ElementsAre(1, 2, 3));
}

}  // namespace
}  // namespace ashlar::storage
