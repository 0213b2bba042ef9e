// SPDX-License-Identifier: Apache-2.0
// PrefixHistory: the known prefixes of earlier prompts, and the order in which they are erased.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

#include "absl/container/btree_set.h"
#include "storage/prefix/prefix_entry.h"
#include "storage/prefix/prefix_tree.h"

namespace ashlar::storage {

// Keeps each node's edge record (PrefixEntry), and the stored blocks' keys of edges that are split or joined. One
// thread only.
class PrefixHistory {
 public:
  using Tree = PrefixTree<PrefixEntry>;

  // Keys are of blocks of `page_tokens` tokens.
  explicit PrefixHistory(uint64_t page_tokens) : page_tokens_(page_tokens) {}

  const Tree& tree() const { return tree_; }
  // Returns the node of a prefix, and adds it if there is none.
  PrefixNode& NodeAt(std::span<const int32_t> prefix);
  // Adds nodes for a text and for its beginnings of `cuts` tokens, and visits them. `prompt`: tokens of the text that
  // are not decoded.
  Tree::Inserted Extend(std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> cuts,
                        RequestTime now);

  // The leaf whose last visit is longest ago; null without leaves.
  PrefixNode* oldest() const { return leaves_.empty() ? nullptr : leaves_.begin()->node; }
  void Visit(PrefixNode& node, RequestTime now);
  // Erases a leaf. Its parent is joined with the following edge if nothing would resume there.
  void Erase(PrefixNode& leaf);

  // The nodes without the root, in any order, which changes with Erase only.
  size_t size() const { return nodes_.size(); }
  PrefixNode& operator[](size_t place) const { return *nodes_[place]; }

 private:
  struct Leaf {
    RequestTime visited;
    uint64_t serial;
    PrefixNode* node;
    bool operator<(const Leaf& other) const {
      return visited != other.visited ? visited < other.visited : serial < other.serial;
    }
  };

  static Leaf LeafOf(PrefixNode& node) { return {node.data.visited, node.data.serial, &node}; }
  void AdoptSplit(const Tree::Made& made);
  void Adopt(PrefixNode& node);
  void Disown(PrefixNode& node);
  // Assign the stored blocks' keys when an edge is split, or joined with the following edge.
  void SplitKeys(PrefixNode& node, PrefixNode& behind) const;
  void JoinKeys(PrefixNode& node) const;

  const uint64_t page_tokens_;
  Tree tree_;
  std::deque<PrefixNode*> nodes_;  // without the root; grows without moving
  uint64_t serials_ = 0;
  absl::btree_set<Leaf> leaves_;  // oldest first
};

}  // namespace ashlar::storage
