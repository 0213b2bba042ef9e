// SPDX-License-Identifier: Apache-2.0
// PrefixTree: a radix tree over the tokens of prompts, which stores a common beginning once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/functional/function_ref.h"
#include "storage/memory/huge_pages.h"

namespace ashlar::storage {

// A node is a prefix: the tokens on the path from the root. Its edge holds the tokens after its parent. The owner marks
// prefixes by nodes, even inside an edge, so a node may have a single child. `Data` is the owner's record of a prefix.
// Children are ordered by token, so nothing depends on addresses. One thread at a time.
template <typename Data>
class PrefixTree {
 public:
  class Node {
   public:
    Node* parent() const { return parent_; }  // null for the root
    uint64_t depth() const { return depth_; }
    uint64_t begin() const { return depth_ - edge_.size(); }  // depth of its parent
    std::span<const int32_t> edge() const { return edge_; }
    bool leaf() const { return children_.empty(); }
    size_t children() const { return children_.size(); }
    Node& first_child() const { return *children_.begin()->second; }
    void ForEachChild(absl::FunctionRef<void(Node&)> visit) const {
      for (const auto& [token, child] : children_) visit(*child);
    }

    // Visits the first `most` children.
    void ForSomeChildren(size_t most, absl::FunctionRef<void(Node&)> visit) const {
      for (auto child = children_.begin(); child != children_.end() && most > 0; ++child, --most) visit(*child->second);
    }

    Data data{};

   private:
    friend PrefixTree;
    Node* parent_ = nullptr;
    uint64_t depth_ = 0;
    std::vector<int32_t> edge_;
    absl::btree_map<int32_t, Node*> children_;  // key: first token of the edge
  };

  PrefixTree() : root_(table_.New()) {}
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;
  ~PrefixTree() {
    Node* node = root_;
    while (true) {  // iterative, because a conversation may be a chain of any length
      while (!node->leaf()) node = &node->first_child();
      if (node == root_) break;
      Node* const parent = node->parent();
      Remove(*node);
      node = parent;
    }
    table_.Delete(root_);
  }

  Node& root() const { return *root_; }
  size_t nodes() const { return nodes_; }      // without the root
  uint64_t tokens() const { return tokens_; }  // sum over all edges

  // The known part of a prompt.
  struct Reached {
    Node* node;              // the deepest node that is a prefix of the prompt; possibly the root
    Node* inside = nullptr;  // child in whose edge the prompt ends or diverges; null if it does so at `node`
    uint64_t depth = 0;      // common tokens
  };
  // `passed` gets every node that is a prefix of the prompt, except the root.
  Reached Walk(
      std::span<const int32_t> tokens, absl::FunctionRef<void(Node&)> passed = [](Node&) {}) const {
    Reached at{.node = root_};
    while (at.depth < tokens.size()) {
      const auto next = at.node->children_.find(tokens[at.depth]);
      if (next == at.node->children_.end()) break;
      Node& child = *next->second;
      const std::span<const int32_t> rest = tokens.subspan(at.depth);
      const size_t longest = std::min(rest.size(), child.edge_.size());
      const size_t same = Same(rest.data(), child.edge_.data(), longest);
      at.depth += same;
      if (same < child.edge_.size()) {
        at.inside = &child;
        break;
      }
      at.node = &child;
      passed(child);
    }
    return at;
  }

  // A node created inside an edge. `behind` is the old node of that edge, which keeps the rest of it.
  struct Made {
    Node* node;
    Node* behind;
  };
  // The nodes that are prefixes of the tokens, except the root.
  std::vector<Node*> Way(std::span<const int32_t> tokens) const {
    std::vector<Node*> way;
    Walk(tokens, [&way](Node& node) { way.push_back(&node); });
    return way;
  }
  // Returns the node of a path with that depth; null if there is none.
  static Node* NodeOn(std::span<Node* const> way, uint64_t depth) {
    const auto at = std::ranges::lower_bound(way, depth, {}, &Node::depth);
    return at == way.end() || (*at)->depth() != depth ? nullptr : *at;
  }

  struct Inserted {
    Node* node;                  // the node of all tokens
    uint64_t known;              // tokens that were already in the tree
    bool added;                  // `node` is a new leaf
    std::optional<Made> parted;  // where the tokens diverge from or end in an edge; its node may be `node`
    std::vector<Made> cut;       // created at depths of `cuts`, ascending
    std::vector<Node*> at;       // the nodes at `cuts`
  };
  // Adds nodes for the tokens and for their beginnings of `cuts` tokens (ascending, in (0, tokens.size()]) in one pass:
  // each token is compared and copied once. New nodes have empty data.
  Inserted Insert(std::span<const int32_t> tokens, std::span<const uint64_t> cuts = {}) {
    std::vector<Node*> way;
    const Reached reached = Walk(tokens, [&way](Node& node) { way.push_back(&node); });
    Inserted result{.node = reached.node, .known = reached.depth, .added = reached.depth < tokens.size()};
    if (reached.inside != nullptr) {
      Node& parted = *Split(*reached.inside, std::span(&reached.depth, 1)).front();
      result.parted = Made{&parted, reached.inside};
      result.node = &parted;
      way.push_back(&parted);
    }
    size_t next = 0;
    for (Node* const node : way) {
      const size_t first = next;
      while (next < cuts.size() && cuts[next] < node->depth()) ++next;
      for (Node* const made : Split(*node, cuts.subspan(first, next - first))) {
        result.cut.push_back({made, node});
        result.at.push_back(made);
      }
      if (next < cuts.size() && cuts[next] == node->depth()) {
        result.at.push_back(node);
        ++next;
      }
    }
    if (!result.added) return result;
    const size_t made = result.at.size();
    Node* last = result.node;
    for (; next < cuts.size() && cuts[next] < tokens.size(); ++next) {
      last = &Append(*last, tokens.subspan(last->depth(), cuts[next] - last->depth()));
      result.at.push_back(last);
    }
    result.node = &Append(*last, tokens.subspan(last->depth()));
    for (size_t i = made; i < result.at.size(); ++i) result.cut.push_back({result.at[i], result.node});
    if (next < cuts.size()) result.at.push_back(result.node);
    return result;
  }

  // Adds a leaf to `parent`, which has no child with that first token. `edge` must not be empty.
  Node& Append(Node& parent, std::span<const int32_t> edge) {
    Node* const node = table_.New();
    ++nodes_;
    tokens_ += edge.size();
    node->parent_ = &parent;
    node->depth_ = parent.depth_ + edge.size();
    node->edge_.assign(edge.begin(), edge.end());
    parent.children_.emplace(edge.front(), node);
    return *node;
  }

  // `leaf` must not be the root. Its parent stays, even without children.
  void Remove(Node& leaf) {
    leaf.parent_->children_.erase(leaf.edge_.front());
    Drop(leaf);
  }

  // `node` has one child and is not the root. The child takes over its edge.
  void Merge(Node& node) {
    Node& child = node.first_child();
    tokens_ += node.edge_.size();
    std::vector<int32_t> edge;
    edge.reserve(node.edge_.size() + child.edge_.size());  // exact, because reserved memory is counted
    edge.insert(edge.end(), node.edge_.begin(), node.edge_.end());
    edge.insert(edge.end(), child.edge_.begin(), child.edge_.end());
    child.edge_ = std::move(edge);
    child.parent_ = node.parent_;
    node.parent_->children_[node.edge_.front()] = &child;
    Drop(node);
  }

  // Memory of tokens and nodes, with an estimate for tables of children.
  uint64_t bytes() const { return tokens_ * sizeof(int32_t) + nodes_ * (sizeof(Node) + kBytesPerChild); }

 private:
  static constexpr uint64_t kBytesPerChild = 32;  // an entry of a half-full btree_map

  // Returns the number of equal leading tokens. Most edges match completely, and memcmp is the fastest test for that.
  static size_t Same(const int32_t* a, const int32_t* b, size_t count) {
    if (std::memcmp(a, b, count * sizeof(int32_t)) == 0) return count;
    return static_cast<size_t>(std::mismatch(a, a + count, b).first - a);
  }

  // Adds nodes at `depths`, ascending, inside the edge of `child`. Each piece is copied once.
  std::vector<Node*> Split(Node& child, std::span<const uint64_t> depths) {
    std::vector<Node*> made;
    if (depths.empty()) return made;
    const std::vector<int32_t> edge = std::move(child.edge_);
    const uint64_t begin = child.depth_ - edge.size();
    const auto piece = [&](uint64_t from, uint64_t to) {
      return std::vector<int32_t>(edge.begin() + static_cast<ptrdiff_t>(from - begin),
                                  edge.begin() + static_cast<ptrdiff_t>(to - begin));
    };
    Node* parent = child.parent_;
    uint64_t from = begin;
    for (const uint64_t depth : depths) {
      Node* const node = table_.New();
      ++nodes_;
      node->parent_ = parent;
      node->depth_ = depth;
      node->edge_ = piece(from, depth);
      parent->children_[node->edge_.front()] = node;
      made.push_back(node);
      parent = node;
      from = depth;
    }
    child.edge_ = piece(from, child.depth_);
    child.parent_ = parent;
    parent->children_.emplace(child.edge_.front(), &child);
    return made;
  }

  void Drop(Node& node) {
    tokens_ -= node.edge_.size();
    --nodes_;
    table_.Delete(&node);
  }

  NodePool<Node> table_;
  Node* const root_;
  size_t nodes_ = 0;
  uint64_t tokens_ = 0;
};

}  // namespace ashlar::storage
