// PrefixTree: a radix tree over the tokens of prompts, which stores a common beginning once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/functional/function_ref.h"
#include "storage/memory/huge_pages.h"

namespace ashlar::storage {

// A node stands for a prefix: the tokens on the way from the root to it. Its edge holds the tokens behind its parent.
// The owner of the tree marks prefixes by nodes, also inside what would otherwise be one edge, so a node may have one
// child. The owner keeps its record of each prefix as `Data`. The order of children is that of tokens: nothing depends
// on addresses. One thread at a time.
template <typename Data>
class PrefixTree {
 public:
  class Node {
   public:
    Node* parent() const { return parent_; }  // null: the root
    uint64_t depth() const { return depth_; }
    uint64_t begin() const { return depth_ - edge_.size(); }  // its parent's depth
    std::span<const int32_t> edge() const { return edge_; }
    bool leaf() const { return children_.empty(); }
    size_t children() const { return children_.size(); }
    Node& first_child() const { return *children_.begin()->second; }
    void ForEachChild(absl::FunctionRef<void(Node&)> visit) const {
      for (const auto& [token, child] : children_) visit(*child);
    }

    // The first of them, `most` at most.
    void ForSomeChildren(size_t most, absl::FunctionRef<void(Node&)> visit) const {
      for (auto child = children_.begin(); child != children_.end() && most > 0; ++child, --most) visit(*child->second);
    }

    Data data{};

   private:
    friend PrefixTree;
    Node* parent_ = nullptr;
    uint64_t depth_ = 0;
    std::vector<int32_t> edge_;
    absl::btree_map<int32_t, Node*> children_;  // by their edges' first token
  };

  PrefixTree() : root_(table_.New()) {}
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;
  ~PrefixTree() {
    Node* node = root_;
    while (true) {  // not by recursion: a conversation may be a chain of any length
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
  uint64_t tokens() const { return tokens_; }  // of all edges

  // The known part of a prompt.
  struct Reached {
    Node* node;  // the deepest one that is a prefix of the prompt; the root at least
    Node* inside =
        nullptr;         // its child in whose edge the prompt ends, or leaves it; null: it ends, or leaves, at `node`
    uint64_t depth = 0;  // tokens in common
  };
  // `passed`: is told every node that is a prefix of the prompt, but for the root, from there on.
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

  struct Inserted {
    Node* node;             // stands for all of the tokens
    Node* split = nullptr;  // a node made on the way, inside an edge that was one: that of `behind`. May be `node`
    Node* behind = nullptr;
    bool added = false;  // `node` is new behind all that was known, a leaf
  };
  // The nodes that are made have empty data.
  Inserted Insert(std::span<const int32_t> tokens) {
    Reached at = Walk(tokens);
    Inserted result{.node = at.node};
    if (at.inside != nullptr) {
      result.behind = at.inside;
      result.node = result.split = &Split(*at.inside, at.depth);
    }
    if (at.depth == tokens.size()) return result;
    result.node = &Append(*result.node, tokens.subspan(at.depth));
    result.added = true;
    return result;
  }

  // A leaf behind `parent`, none of whose children begins with that token. `edge` is not empty.
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

  // A leaf, not the root. Its parent stays, even where nothing else is behind it.
  void Remove(Node& leaf) {
    leaf.parent_->children_.erase(leaf.edge_.front());
    Drop(leaf);
  }

  // A node with one child, not the root: the child takes over its edge, and stays what it was.
  void Merge(Node& node) {
    Node& child = node.first_child();
    tokens_ += node.edge_.size();
    std::vector<int32_t> edge;
    edge.reserve(node.edge_.size() + child.edge_.size());  // no more: what is reserved counts
    edge.insert(edge.end(), node.edge_.begin(), node.edge_.end());
    edge.insert(edge.end(), child.edge_.begin(), child.edge_.end());
    child.edge_ = std::move(edge);
    child.parent_ = node.parent_;
    node.parent_->children_[node.edge_.front()] = &child;
    Drop(node);
  }

  // The memory that tokens and nodes take, children's tables estimated.
  uint64_t bytes() const { return tokens_ * sizeof(int32_t) + nodes_ * (sizeof(Node) + kBytesPerChild); }

 private:
  static constexpr uint64_t kBytesPerChild = 32;  // an entry of a btree_map that is half full

  // Returns how many leading tokens are equal. Most edges are passed whole, and memcmp is the fastest test of that.
  static size_t Same(const int32_t* a, const int32_t* b, size_t count) {
    if (std::memcmp(a, b, count * sizeof(int32_t)) == 0) return count;
    return static_cast<size_t>(std::mismatch(a, a + count, b).first - a);
  }

  // Puts a node at `depth` inside `child`'s edge.
  Node& Split(Node& child, uint64_t depth) {
    const auto taken = static_cast<ptrdiff_t>(depth - child.begin());
    Node* const node = table_.New();
    ++nodes_;
    node->parent_ = child.parent_;
    node->depth_ = depth;
    node->edge_.assign(child.edge_.begin(), child.edge_.begin() + taken);
    child.parent_->children_[child.edge_.front()] = node;
    child.edge_.erase(child.edge_.begin(), child.edge_.begin() + taken);
    child.edge_.shrink_to_fit();
    child.parent_ = node;
    node->children_.emplace(child.edge_.front(), &child);
    return *node;
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
