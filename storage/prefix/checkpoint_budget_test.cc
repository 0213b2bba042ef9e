// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/checkpoint_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "storage/testing/prefix_recount.h"

namespace ashlar::storage {
namespace {

using ::testing::UnorderedElementsAreArray;

constexpr PrefixCosts kTokens{.page_tokens = 1, .page_bytes = 10, .checkpoint_bytes = 100, .flops_per_token = 1};
constexpr PrefixCosts kPages{.page_tokens = 16, .page_bytes = 160, .checkpoint_bytes = 100, .flops_per_token = 1};

class CheckpointBudgetTest : public ::testing::Test {
 protected:
  // A prefix that came now: `first` and then 0, 1, 2 ….
  PrefixNode& Node(int32_t first, uint64_t depth, RequestTime used = 0) {
    std::vector<int32_t> tokens = {first};
    while (tokens.size() < depth) tokens.push_back(static_cast<int32_t>(tokens.size()));
    return Candidate(tokens, used);
  }
  PrefixNode& Candidate(const std::vector<int32_t>& tokens, RequestTime used = 0) {
    const auto inserted = tree_.Insert(tokens);
    if (inserted.parted) inserted.parted->node->data.needs = inserted.parted->behind->data.needs > 0 ? 1 : 0;
    PrefixNode& node = *inserted.node;
    if (!node.data.kind) node.data.kind = ReuseKind::kBranch;
    node.data.used = used;
    return node;
  }
  std::vector<const PrefixNode*> Kept(const PrefixCosts& costs) const { return Recount(tree_.root(), costs).kept; }

  PrefixTree<PrefixEntry> tree_;
  ReuseModel model_;
};

TEST_F(CheckpointBudgetTest, CountsPagesOnceAndStatesEach) {
  CheckpointBudget store(kTokens, 100'000, model_, 1);
  PrefixNode& deep = Node(1, 50);
  ASSERT_TRUE(store.Admit(deep, 0));
  EXPECT_EQ(store.bytes(), 100u + 50 * 10);
  PrefixNode& inner = Node(1, 20);
  ASSERT_TRUE(store.Admit(inner, 0));
  EXPECT_EQ(store.bytes(), 2 * 100u + 50 * 10) << "the pages were there";
  store.Drop(deep);
  EXPECT_EQ(store.bytes(), 100u + 20 * 10);
  ASSERT_TRUE(store.Admit(deep, 0));
  store.Drop(inner);
  EXPECT_EQ(store.bytes(), 100u + 50 * 10) << "an inner one's pages stay for those behind";
  store.Drop(deep);
  EXPECT_EQ(store.bytes(), 0u);
  EXPECT_EQ(store.checkpoints(), 0u);
  EXPECT_EQ(store.peak_bytes(), 2 * 100u + 50 * 10);
}

TEST_F(CheckpointBudgetTest, TailsAreOfWholePages) {
  CheckpointBudget store(kPages, 100'000, model_, 1);
  ASSERT_TRUE(store.Admit(Node(1, 16), 0));
  EXPECT_EQ(store.bytes(), 100u + 160);
  ASSERT_TRUE(store.Admit(Node(2, 17), 0));
  EXPECT_EQ(store.bytes(), 2 * 100u + 3 * 160) << "one page and a tail";
  ASSERT_TRUE(store.Admit(Node(3, 15), 0));
  EXPECT_EQ(store.bytes(), 3 * 100u + 4 * 160) << "a tail alone";
}

TEST_F(CheckpointBudgetTest, BeforeIsTheDeepestThatIsKept) {
  CheckpointBudget store(kTokens, 100'000, model_, 1);
  PrefixNode &a = Node(1, 10), &b = Node(1, 20), &c = Node(1, 30);
  EXPECT_EQ(&CheckpointPrices::Before(c), &tree_.root());
  ASSERT_TRUE(store.Admit(a, 0));
  EXPECT_EQ(&CheckpointPrices::Before(c), &a);
  ASSERT_TRUE(store.Admit(b, 0));
  EXPECT_EQ(&CheckpointPrices::Before(c), &b);
  EXPECT_EQ(&CheckpointPrices::Before(b), &a);
  EXPECT_EQ(&CheckpointPrices::Before(a), &tree_.root());
}

// FLOPs a byte, a request: what it saves over the one before, by what only it holds.
TEST_F(CheckpointBudgetTest, PriceIsSavingPerFreedByte) {
  PrefixCosts costs = kTokens;
  costs.flops_per_square = 2;
  CheckpointBudget store(costs, 100'000, model_, 1);
  PrefixNode &a = Node(1, 10), &b = Node(1, 30);
  const double rate = model_.Rate({ReuseKind::kBranch, 0, 0}, 5);
  EXPECT_DOUBLE_EQ(store.prices().Price(b, 5), rate * (30 + 2 * 900) / (100 + 300));
  ASSERT_TRUE(store.Admit(a, 5));
  EXPECT_DOUBLE_EQ(store.prices().Price(b, 5), rate * (30 + 2 * 900 - 10 - 2 * 100) / (100 + 200));
  ASSERT_TRUE(store.Admit(b, 5));
  EXPECT_DOUBLE_EQ(store.prices().Price(a, 5), rate * (10 + 2 * 100) / 100) << "the pages would stay";
  EXPECT_DOUBLE_EQ(store.prices().Price(b, 5), rate * (30 + 2 * 900 - 10 - 2 * 100) / (100 + 200)) << "kept or not";
}

TEST_F(CheckpointBudgetTest, PricesAlongAPathMatchSinglePrices) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 100; ++round) {
    PrefixTree<PrefixEntry> tree;
    CheckpointBudget store(kPages, 1'000'000, model_, 1);
    std::vector<PrefixNode*> way;
    PrefixNode* at = &tree.root();
    for (int i = 0; i < 12; ++i) {
      const std::vector<int32_t> edge(1 + random() % 20, 7);
      at = &tree.Append(*at, edge);
      at->data.kind = ReuseKind::kBranch;
      way.push_back(at);
    }
    PrefixNode& side = tree.Append(*way[random() % way.size()], std::vector<int32_t>{1, 2, 3});
    side.data.kind = ReuseKind::kBranch;
    const size_t resume = random() % 6;
    if (random() % 2 == 0) store.Admit(side, 1);
    if (random() % 2 == 0) store.Admit(*way[resume], 1);
    std::vector<const PrefixNode*> missing;
    for (size_t i = resume + 1; i < way.size(); ++i) {
      if (random() % 3 != 0) missing.push_back(way[i]);
    }
    const std::vector<double> prices = store.prices().Prices(missing, 9);
    ASSERT_EQ(prices.size(), missing.size());
    for (size_t i = 0; i < missing.size(); ++i) ASSERT_DOUBLE_EQ(prices[i], store.prices().Price(*missing[i], 9));
  }
}

TEST_F(CheckpointBudgetTest, EvictsTheCheapest) {
  CheckpointBudget store(kTokens, 2 * (100 + 10 * 10), model_, 1);
  PrefixNode &old = Node(1, 10, 1), &young = Node(2, 10, 50), &next = Node(3, 10, 100);
  ASSERT_TRUE(store.Admit(young, 100));
  ASSERT_TRUE(store.Admit(old, 100));
  EXPECT_EQ(store.LeastPrice(100), store.prices().Price(old, 100));
  EXPECT_EQ(store.going_price(), 0);
  const double cheapest = store.prices().Price(old, 100);
  ASSERT_TRUE(store.Admit(next, 100));
  EXPECT_THAT(Kept(kTokens), UnorderedElementsAreArray({&young, &next}));
  EXPECT_EQ(store.evictions(), 1u);
  EXPECT_GT(store.going_price(), 0);
  EXPECT_LE(store.going_price(), cheapest);
}

TEST_F(CheckpointBudgetTest, RefusesLessValuableCheckpoints) {
  CheckpointBudget store(kTokens, 3 * (100 + 10 * 10), model_, 1);
  PrefixNode &a = Node(1, 10, 60), &b = Node(2, 10, 90), &c = Node(3, 10, 95);
  for (PrefixNode* node : {&a, &b, &c}) ASSERT_TRUE(store.Admit(*node, 100));
  // Worth more than one of them, but two would have to leave, and the second is dearer.
  PrefixNode& wide = Node(4, 22, 80);
  ASSERT_GT(store.prices().Price(wide, 100), store.prices().Price(a, 100));
  ASSERT_LT(store.prices().Price(wide, 100), store.prices().Price(b, 100));
  EXPECT_FALSE(store.Admit(wide, 100));
  EXPECT_THAT(Kept(kTokens), UnorderedElementsAreArray({&a, &b, &c}));
  EXPECT_FALSE(wide.data.kept);
  EXPECT_EQ(store.bytes(), store.capacity_bytes());
  EXPECT_EQ(store.evictions(), 0u);
  EXPECT_EQ(store.refusals(), 1u);
  EXPECT_EQ(store.going_price(), 0);
  EXPECT_TRUE(Recount(tree_.root(), kTokens).needs_hold);
}

TEST_F(CheckpointBudgetTest, RefusesCheckpointsLargerThanTheBudget) {
  CheckpointBudget store(kTokens, 500, model_, 1);
  ASSERT_TRUE(store.Admit(Node(1, 10), 0));
  EXPECT_FALSE(store.Admit(Node(2, 41), 0)) << "100 + 410";
  EXPECT_EQ(store.checkpoints(), 1u);
  EXPECT_EQ(store.refusals(), 1u);
  EXPECT_TRUE(store.Admit(Node(2, 40), 0)) << "just fits, and is as new";
}

TEST_F(CheckpointBudgetTest, LeasedCheckpointStays) {
  CheckpointBudget store(kTokens, 2 * (100 + 10 * 10), model_, 1);
  PrefixNode &a = Node(1, 10, 1), &b = Node(2, 10, 2), &next = Node(3, 10, 1000);
  ASSERT_TRUE(store.Admit(a, 3));
  ASSERT_TRUE(store.Admit(b, 3));
  store.Lease(a);
  store.Lease(b);
  store.Lease(b);
  EXPECT_FALSE(store.Admit(next, 1000));
  EXPECT_EQ(store.checkpoints(), 2u);
  store.Release(b);
  EXPECT_FALSE(store.Admit(next, 1000));
  store.Release(b);
  EXPECT_TRUE(store.Admit(next, 1000));
  EXPECT_THAT(Kept(kTokens), UnorderedElementsAreArray({&a, &next})) << "though it is the oldest";
}

TEST_F(CheckpointBudgetTest, LeastPriceIsZeroWithFreeSpace) {
  CheckpointBudget store(kTokens, 320, model_, 1);
  EXPECT_EQ(store.LeastPrice(0), 0);
  ASSERT_TRUE(store.Admit(Node(1, 10), 0));
  EXPECT_EQ(store.LeastPrice(0), 0) << "a checkpoint and a page";
  ASSERT_TRUE(store.Admit(Node(1, 5), 0));
  EXPECT_GT(store.LeastPrice(0), 0);
}

// Among many, a sample is drawn: the victim is still among the cheapest. Those found to be cheap are used meanwhile:
// others leave in their place, however many.
TEST_F(CheckpointBudgetTest, EvictsNoLeasedCheckpoint) {
  constexpr int kMany = 1000;
  CheckpointBudget store(kTokens, kMany * 200, model_, std::random_device()());
  std::vector<PrefixNode*> nodes;
  for (int i = 0; i < kMany; ++i) nodes.push_back(&Node(i, 10, static_cast<RequestTime>(i < kMany / 2 ? 1 : 900)));
  for (PrefixNode* node : nodes) ASSERT_TRUE(store.Admit(*node, 1000));
  EXPECT_GT(store.LeastPrice(1000), 0);
  for (int i = 0; i < kMany / 2; ++i) store.Lease(*nodes[static_cast<size_t>(i)]);
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(store.Admit(Node(kMany + i, 10, 1000), 1000)) << i;
  for (int i = 0; i < kMany / 2; ++i) ASSERT_TRUE(nodes[static_cast<size_t>(i)]->data.kept);
  EXPECT_EQ(store.evictions(), 100u);
}

TEST_F(CheckpointBudgetTest, EvictsCheapCheckpointAmongMany) {
  constexpr int kMany = 1000;
  CheckpointBudget store(kTokens, kMany * 200, model_, std::random_device()());
  std::vector<PrefixNode*> nodes;
  for (int i = 0; i < kMany; ++i) nodes.push_back(&Node(i, 10, static_cast<RequestTime>(i < kMany / 2 ? 1 : 1 << 20)));
  for (PrefixNode* node : nodes) ASSERT_TRUE(store.Admit(*node, 1 << 20));
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(store.Admit(Node(kMany + i, 10, 1 << 20), 1 << 20));
  const auto kept = [](const PrefixNode* node) { return node->data.kept; };
  EXPECT_EQ(std::count_if(nodes.begin() + kMany / 2, nodes.end(), kept), kMany / 2)
      << "hundreds drawn, and none of them old";
  EXPECT_EQ(std::count_if(nodes.begin(), nodes.end(), kept), kMany - 100);
}

// At every step: what is kept sums up, capacity holds, leases hold, and refusals change nothing.
void RandomTraffic(const PrefixCosts& costs, uint64_t seed) {
  std::mt19937_64 random(seed);
  PrefixTree<PrefixEntry> tree;
  const ReuseModel model;
  CheckpointBudget store(costs, 500 + random() % 5000, model, seed);
  std::vector<PrefixNode*> nodes, leased;
  for (RequestTime now = 1; now < 150; ++now) {
    std::vector<int32_t> tokens(1 + random() % 40);
    for (int32_t& token : tokens) token = random() % 8 == 0 ? 1 : 0;
    const auto inserted = tree.Insert(tokens);
    PrefixNode* const parted = inserted.parted ? inserted.parted->node : nullptr;
    if (parted != nullptr) parted->data.needs = inserted.parted->behind->data.needs > 0 ? 1 : 0;
    for (PrefixNode* node : {parted, inserted.node}) {
      if (node == nullptr || node->data.kind) continue;
      node->data.kind = static_cast<ReuseKind>(random() % 3);
      nodes.push_back(node);
    }
    ASSERT_EQ(Recount(tree.root(), costs).bytes, store.bytes()) << "nodes alone change nothing";
    PrefixNode& node = *nodes[random() % nodes.size()];
    node.data.used = now;
    if (node.data.kept) {
      if (random() % 4 == 0 && node.data.leases == 0) store.Drop(node);
    } else {
      const PrefixRecount before = Recount(tree.root(), costs);
      const double worth = store.prices().Price(node, now);
      const uint64_t evictions = store.evictions();
      const bool admitted = store.Admit(node, now);
      const PrefixRecount after = Recount(tree.root(), costs);
      ASSERT_EQ(node.data.kept, admitted);
      if (admitted) {
        ASSERT_EQ(after.kept.size() + (store.evictions() - evictions), before.kept.size() + 1);
      } else {
        ASSERT_EQ(after.kept, before.kept);
        ASSERT_EQ(after.bytes, before.bytes);
        ASSERT_EQ(store.prices().Price(node, now), worth);
      }
    }
    if (node.data.kept && random() % 4 == 0) {
      store.Lease(node);
      leased.push_back(&node);
    }
    if (leased.size() > 5) {
      store.Release(*leased.front());
      leased.erase(leased.begin());
    }
    for (const PrefixNode* held : leased) ASSERT_TRUE(held->data.kept);
    const PrefixRecount count = Recount(tree.root(), costs);
    ASSERT_TRUE(count.needs_hold);
    ASSERT_EQ(store.bytes(), count.bytes);
    ASSERT_EQ(store.checkpoints(), count.kept.size());
    ASSERT_LE(store.bytes(), store.capacity_bytes());
    ASSERT_GE(store.peak_bytes(), store.bytes());
    ASSERT_LE(store.peak_bytes(), store.capacity_bytes());
  }
}

TEST(CheckpointBudgetRandomTest, MatchesModel) {
  for (int round = 0; round < 8; ++round) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    ASSERT_NO_FATAL_FAILURE(RandomTraffic(kTokens, seed));
    ASSERT_NO_FATAL_FAILURE(RandomTraffic(kPages, seed));
  }
}

}  // namespace
}  // namespace ashlar::storage
