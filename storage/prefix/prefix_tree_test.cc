// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/prefix_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "storage/testing/tokens.h"

namespace ashlar::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Tree = PrefixTree<int>;  // a node's name; 0: none yet

size_t Common(const Tokens& a, const Tokens& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

bool Begins(const Tokens& whole, const Tokens& part) {
  return Common(whole, part) == part.size();
}

Tokens Range(int32_t first, int32_t behind) {
  Tokens tokens;
  for (int32_t token = first; token < behind; ++token) tokens.push_back(token);
  return tokens;
}

Tokens PrefixOf(const Tree::Node& node) {
  std::vector<const Tree::Node*> way;
  for (const Tree::Node* at = &node; at->parent() != nullptr; at = at->parent()) way.push_back(at);
  Tokens tokens;
  for (auto at = way.rbegin(); at != way.rend(); ++at) {
    tokens.insert(tokens.end(), (*at)->edge().begin(), (*at)->edge().end());
  }
  return tokens;
}

// A model of the tree: a list of named sequences. The root is the empty sequence.
class Model {
 public:
  struct Reached {
    Tokens node, inside;  // empty: the root, or none
    uint64_t depth = 0;
    std::vector<int> passed;
  };
  struct Inserted {
    bool split = false, added = false;
    Tokens at, behind;
  };

  Reached Walk(const Tokens& tokens) const {
    Reached reached;
    for (const auto& [known, name] : names_) reached.depth = std::max(reached.depth, Common(known, tokens));
    for (const auto& [known, name] : names_) {  // prefixes of other texts come before them
      if (Begins(tokens, known)) {
        reached.node = known;
        reached.passed.push_back(name);
      } else if (reached.inside.empty() && reached.depth > 0 && Common(known, tokens) == reached.depth) {
        reached.inside = known;
      }
    }
    if (reached.node.size() == reached.depth) reached.inside.clear();
    return reached;
  }

  Inserted Insert(const Tokens& tokens) {
    const Reached reached = Walk(tokens);
    Inserted inserted{.split = !reached.inside.empty(),
                      .added = reached.depth < tokens.size(),
                      .at = First(tokens, reached.depth),
                      .behind = reached.inside};
    if (inserted.split) names_[inserted.at] = 0;
    if (inserted.added) names_[tokens] = 0;
    return inserted;
  }

  void Name(const Tokens& tokens, int name) { names_.at(tokens) = name; }
  void Erase(const Tokens& tokens) { names_.erase(tokens); }
  bool Has(const Tokens& tokens) const { return names_.contains(tokens); }
  const std::map<Tokens, int>& names() const { return names_; }

  Tokens Parent(const Tokens& tokens) const {
    Tokens parent;
    for (const auto& [known, name] : names_) {
      if (known.size() < tokens.size() && Begins(tokens, known)) parent = known;
    }
    return parent;
  }
  std::vector<Tokens> Children(const Tokens& tokens) const {
    std::vector<Tokens> children;
    for (const auto& [known, name] : names_) {
      if (known.size() > tokens.size() && Begins(known, tokens) && Parent(known) == tokens) children.push_back(known);
    }
    return children;
  }

 private:
  std::map<Tokens, int> names_;
};

// Compares everything that can be observed of a tree with the model.
void ExpectAlike(const Tree& tree, const Model& model) {
  uint64_t nodes = 0, tokens = 0;
  std::vector<Tree::Node*> open = {&tree.root()};
  while (!open.empty()) {
    Tree::Node& node = *open.back();
    open.pop_back();
    const Tokens prefix = PrefixOf(node);
    ASSERT_EQ(node.depth(), prefix.size());
    ASSERT_EQ(node.begin() + node.edge().size(), node.depth());
    if (node.parent() != nullptr) {
      ++nodes;
      tokens += node.edge().size();
      ASSERT_TRUE(model.Has(prefix));
      ASSERT_EQ(node.data, model.names().at(prefix));
      ASSERT_EQ(node.begin(), node.parent()->depth());
      ASSERT_EQ(PrefixOf(*node.parent()), model.Parent(prefix));
    }
    const std::vector<Tokens> expected = model.Children(prefix);
    std::vector<Tokens> children;
    node.ForEachChild([&](Tree::Node& child) {
      ASSERT_EQ(child.parent(), &node);
      ASSERT_FALSE(child.edge().empty());
      children.push_back(PrefixOf(child));
      open.push_back(&child);
    });
    ASSERT_EQ(children, expected) << "by their tokens";
    ASSERT_EQ(node.children(), expected.size());
    ASSERT_EQ(node.leaf(), expected.empty());
    if (!expected.empty()) {
      ASSERT_EQ(PrefixOf(node.first_child()), expected.front());
    }
  }
  ASSERT_EQ(nodes, model.names().size());
  ASSERT_EQ(tree.nodes(), nodes);
  ASSERT_EQ(tree.tokens(), tokens);
  ASSERT_GE(tree.bytes(), tokens * sizeof(int32_t) + nodes * sizeof(Tree::Node));
}

void ExpectWalkAlike(const Tree& tree, const Model& model, const Tokens& tokens) {
  std::vector<int> passed;
  const Tree::Reached reached = tree.Walk(tokens, [&](Tree::Node& node) { passed.push_back(node.data); });
  const Model::Reached expected = model.Walk(tokens);
  ASSERT_EQ(reached.depth, expected.depth);
  ASSERT_EQ(passed, expected.passed);
  ASSERT_EQ(PrefixOf(*reached.node), expected.node);
  ASSERT_EQ(reached.inside != nullptr, !expected.inside.empty());
  if (reached.inside != nullptr) {
    ASSERT_EQ(PrefixOf(*reached.inside), expected.inside);
  }
}

class Both {
 public:
  explicit Both(uint64_t seed) : random_(seed) {}

  void Insert(const Tokens& tokens) {
    const Tree::Inserted inserted = tree_.Insert(tokens);
    const Model::Inserted expected = model_.Insert(tokens);
    ASSERT_EQ(inserted.added, expected.added);
    ASSERT_EQ(inserted.parted.has_value(), expected.split);
    ASSERT_EQ(PrefixOf(*inserted.node), tokens);
    ASSERT_TRUE(!inserted.added || inserted.node->leaf());
    if (inserted.parted) {
      ASSERT_EQ(PrefixOf(*inserted.parted->node), expected.at);
      ASSERT_EQ(PrefixOf(*inserted.parted->behind), expected.behind);
      ASSERT_EQ(inserted.parted->behind->parent(), inserted.parted->node);
      ASSERT_EQ(inserted.parted->node->data, 0);
      Name(*inserted.parted->node);
    }
    if (inserted.added) {
      ASSERT_EQ(inserted.node->data, 0);
      Name(*inserted.node);
    }
  }

  // Removes a leaf, or merges a node that has one child.
  void TakeAway(const Tokens& tokens) {
    const Tree::Reached reached = tree_.Walk(tokens);
    if (reached.node->parent() == nullptr) return;
    Tree::Node& node = *reached.node;
    if (node.children() > 1) return;
    model_.Erase(PrefixOf(node));
    if (node.leaf()) return tree_.Remove(node);
    const Tree::Node* const child = &node.first_child();
    const Tree::Node* const parent = node.parent();
    const int name = child->data;
    const uint64_t depth = child->depth(), begin = node.begin();
    tree_.Merge(node);
    ASSERT_EQ(child->parent(), parent);
    ASSERT_EQ(child->data, name);
    ASSERT_EQ(child->depth(), depth);
    ASSERT_EQ(child->begin(), begin);
  }

  // Half of the sequences continue a known one, so that paths diverge inside edges.
  Tokens Random() {
    Tokens tokens;
    if (!model_.names().empty() && random_() % 2 == 0) {
      auto known = model_.names().begin();
      std::advance(known, random_() % model_.names().size());
      tokens = First(known->first, random_() % (known->first.size() + 1));
    }
    for (uint64_t more = random_() % 6; more > 0; --more) tokens.push_back(static_cast<int32_t>(random_() % 3) - 1);
    return tokens;
  }

  const Tree& tree() const { return tree_; }
  const Model& model() const { return model_; }
  std::mt19937_64& random() { return random_; }

 private:
  void Name(Tree::Node& node) {
    node.data = ++names_;
    model_.Name(PrefixOf(node), names_);
  }

  std::mt19937_64 random_;
  Tree tree_;
  Model model_;
  int names_ = 0;
};

TEST(PrefixTreeTest, MatchesSequenceList) {
  for (int round = 0; round < 40; ++round) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    Both both(seed);
    for (int step = 0; step < 120; ++step) {
      const bool grows = both.model().names().size() < 25;
      const Tokens tokens = both.Random();
      if (both.random()() % 4 < (grows ? 3 : 1)) {
        ASSERT_NO_FATAL_FAILURE(both.Insert(tokens));
      } else {
        ASSERT_NO_FATAL_FAILURE(both.TakeAway(tokens));
      }
      ASSERT_NO_FATAL_FAILURE(ExpectWalkAlike(both.tree(), both.model(), both.Random()));
      ASSERT_NO_FATAL_FAILURE(ExpectAlike(both.tree(), both.model()));
    }
  }
}

// Inserting a text with cuts gives the same tree as inserting the text and then each of its beginnings.
TEST(PrefixTreeTest, SplitsATextLikeItsPrefixesDo) {
  for (int round = 0; round < 400; ++round) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    Both both(seed);
    Tree cut;
    for (int step = 0; step < 20; ++step) {
      const Tokens tokens = both.Random();
      std::vector<uint64_t> cuts;
      for (uint64_t depth = 1; depth <= tokens.size(); ++depth) {
        if (both.random()() % 3 == 0) cuts.push_back(depth);
      }
      const uint64_t known = both.tree().Walk(tokens).depth;
      ASSERT_NO_FATAL_FAILURE(both.Insert(tokens));
      for (const uint64_t depth : cuts) ASSERT_NO_FATAL_FAILURE(both.Insert(First(tokens, depth)));
      const Tree::Inserted inserted = cut.Insert(tokens, cuts);
      ASSERT_EQ(inserted.known, known);
      ASSERT_EQ(inserted.at.size(), cuts.size());
      for (size_t i = 0; i < cuts.size(); ++i) ASSERT_EQ(PrefixOf(*inserted.at[i]), First(tokens, cuts[i]));
      for (const Tree::Made& made : inserted.cut) {
        ASSERT_EQ(made.node->data, 0) << "it is new";
        const Tree::Node* at = made.behind;
        while (at != nullptr && at != made.node) at = at->parent();
        ASSERT_EQ(at, made.node) << "it lies before what was one edge with it";
      }
      std::vector<Tree::Node*> open = {&cut.root()};
      while (!open.empty()) {
        Tree::Node& node = *open.back();
        open.pop_back();
        if (node.parent() != nullptr) node.data = both.model().names().at(PrefixOf(node));
        node.ForEachChild([&](Tree::Node& child) { open.push_back(&child); });
      }
      ASSERT_NO_FATAL_FAILURE(ExpectAlike(cut, both.model()));
    }
  }
}

// Long edges, which split at any place.
TEST(PrefixTreeTest, FindsTheTokenWhereLongEdgesDiverge) {
  const Tokens whole = Range(0, 5000);
  for (const int32_t at : {0, 1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 1023, 4097, 4998, 4999}) {
    Tree tree;
    tree.Insert(whole);
    Tokens other = whole;
    other[static_cast<size_t>(at)] = -1;
    const Tree::Reached reached = tree.Walk(other);
    EXPECT_EQ(reached.depth, static_cast<uint64_t>(at));
    EXPECT_EQ(reached.node, &tree.root());
    EXPECT_EQ(reached.inside == nullptr, at == 0);
    const Tree::Inserted inserted = tree.Insert(other);
    EXPECT_EQ(inserted.parted.has_value(), at != 0);
    EXPECT_TRUE(inserted.added);
    EXPECT_EQ(tree.tokens(), 2 * whole.size() - static_cast<uint64_t>(at));
    EXPECT_EQ(tree.Walk(whole).depth, whole.size());
    EXPECT_EQ(tree.Walk(other).node, inserted.node);
  }
}

TEST(PrefixTreeTest, PutsANodeInsideAnEdge) {
  Tree tree;
  Tree::Node& end = *tree.Insert(Range(0, 10)).node;
  end.data = 7;
  const Tree::Inserted middle = tree.Insert(Range(0, 4));
  ASSERT_TRUE(middle.parted);
  EXPECT_EQ(middle.node, middle.parted->node) << "it is what was asked for";
  EXPECT_EQ(middle.parted->behind, &end);
  EXPECT_FALSE(middle.added);
  EXPECT_EQ(end.data, 7) << "the node behind stays what it was";
  EXPECT_EQ(end.begin(), 4u);
  EXPECT_THAT(middle.node->edge(), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(tree.nodes(), 2u);
  EXPECT_EQ(tree.tokens(), 10u);
  tree.Merge(*middle.node);
  EXPECT_EQ(&tree.root().first_child(), &end);
  EXPECT_EQ(end.begin(), 0u);
  EXPECT_EQ(tree.nodes(), 1u);
  EXPECT_EQ(tree.tokens(), 10u);
}

TEST(PrefixTreeTest, EmptySequenceIsRoot) {
  Tree tree;
  const Tree::Inserted inserted = tree.Insert({});
  EXPECT_EQ(inserted.node, &tree.root());
  EXPECT_FALSE(inserted.added);
  EXPECT_EQ(tree.root().parent(), nullptr);
  EXPECT_TRUE(tree.root().leaf());
  EXPECT_THAT(tree.root().edge(), IsEmpty());
  EXPECT_EQ(tree.Walk(Range(0, 3)).depth, 0u);
  EXPECT_EQ(tree.bytes(), 0u);
}

TEST(PrefixTreeTest, ChildrenAreInTheOrderOfTokens) {
  Tree tree;
  for (const int32_t token : {5, -3, 2147483647, 0, -2147483647 - 1}) tree.Insert(Tokens{token, 1});
  Tokens first;
  tree.root().ForEachChild([&](Tree::Node& child) { first.push_back(child.edge().front()); });
  EXPECT_THAT(first, ElementsAre(-2147483647 - 1, -3, 0, 5, 2147483647));
}

// A chain with one node per token. Recursion would overflow the stack, and returning to the root for each node would
// take too long.
TEST(PrefixTreeTest, DeepChainsAreWalkedAndFreed) {
  constexpr int32_t kDepth = 300'000;
  const Tokens tokens = Range(0, kDepth);
  Tree tree;
  Tree::Node* node = &tree.root();
  for (int32_t token = 0; token < kDepth; ++token) node = &tree.Append(*node, std::span(&token, 1));
  EXPECT_EQ(tree.nodes(), static_cast<size_t>(kDepth));
  size_t passed = 0;
  const Tree::Reached reached = tree.Walk(tokens, [&](Tree::Node&) { ++passed; });
  EXPECT_EQ(reached.node, node);
  EXPECT_EQ(reached.depth, tokens.size());
  EXPECT_EQ(passed, tokens.size());
}

// Chains attached to one another's ends: every node is freed once (checked by AddressSanitizer and its leak checker).
TEST(PrefixTreeTest, FreesWideTrees) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Both both(seed);
  for (int i = 0; i < 200; ++i) ASSERT_NO_FATAL_FAILURE(both.Insert(both.Random()));
  ASSERT_NO_FATAL_FAILURE(ExpectAlike(both.tree(), both.model()));
}

}  // namespace
}  // namespace ashlar::storage
