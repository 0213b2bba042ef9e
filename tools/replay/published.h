// SPDX-License-Identifier: Apache-2.0
// The published policies that are compared with, with their faults mended: no byte beyond the capacity, an eviction
// counts the bytes that it evicts, and an entry that does not fit alone is refused.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "storage/prefix/prefix_entry.h"
#include "storage/prefix/prefix_tree.h"
#include "tools/replay/policy.h"

namespace ashlar::replay {

// Marconi (Pan and others, 2025): a state at the end of every request, and where prompts part once a second one does.
// Every node of the tree has a state, and resuming is possible at nodes alone. Evicted is the node of the least
// S = recency + α · FLOP efficiency, both normalised over the candidates.
class MarconiPolicy final : public Policy {
 public:
  enum class Mode : uint8_t {
    kLru,    // SGLang+: the same admission; the least recently used leaf goes, a use touches all nodes on the way
    kFixed,  // α as given
    kTuned,  // α is 0 until the first eviction; after five times the requests seen until then, the one that would have
             // saved the most FLOPs on all of them
  };
  MarconiPolicy(const storage::PrefixCosts& costs, uint64_t capacity_bytes, Mode mode, double alpha = 0);

  uint64_t Request(std::span<const int32_t> tokens, uint64_t prompt) override;
  Usage usage() const override { return usage_; }
  Tuning tuning() const override { return tuning_; }

 private:
  struct Data {
    uint64_t used = 0;
  };
  using Tree = storage::PrefixTree<Data>;
  using Node = Tree::Node;

  // Returns how far the tokens are known, and the node up to which they are; counts as a use of them.
  Tree::Reached Use(std::span<const int32_t> tokens);
  void Insert(std::span<const int32_t> tokens);
  bool Evict();
  std::vector<Node*> Candidates() const;
  Node* Cheapest(const std::vector<Node*>& candidates) const;
  double Efficiency(const Node& node) const;
  void Tune();

  static constexpr size_t kWindow = 5;    // multiple of the requests before the first eviction
  static constexpr size_t kScored = 500;  // number of last requests of the window that α is chosen by
  static constexpr double kStep = 0.1, kMost = 2;

  const storage::PrefixCosts costs_;
  const uint64_t capacity_;
  Mode mode_;
  double alpha_;
  Tree tree_;
  uint64_t now_ = 0, requests_ = 0, before_first_eviction_ = 0;
  struct Recorded {
    std::vector<int32_t> tokens;
    uint64_t prompt;
  };
  std::vector<Recorded> window_;  // requests before the policy is tuned
  Usage usage_;
  Tuning tuning_;
};

// A state every so many tokens, from the first visit on; pages of 64 tokens; least recently used first, leaves first.
class BlockPolicy final : public Policy {
 public:
  static constexpr uint64_t kPageTokens = 64;
  // `spacing`: a multiple of kPageTokens.
  BlockPolicy(const storage::PrefixCosts& costs, uint64_t capacity_bytes, uint64_t spacing);

  uint64_t Request(std::span<const int32_t> tokens, uint64_t prompt) override;
  Usage usage() const override { return usage_; }

 private:
  struct Data {
    uint64_t used = 0;
    uint64_t serial = 0;
  };
  // Over numbers of pages, an edge each: a page is there whole, or it is not.
  using Tree = storage::PrefixTree<Data>;
  using Node = Tree::Node;
  struct Leaf {
    uint64_t used, serial;
    Node* node;
    bool operator<(const Leaf& other) const { return used != other.used ? used < other.used : serial < other.serial; }
  };

  std::vector<int32_t> Pages(std::span<const int32_t> tokens);
  bool HasState(const Node& node) const { return node.depth() * kPageTokens % spacing_ == 0; }
  bool Append(Node*& at, int32_t page);
  void Touch(Node& node);
  bool EvictOldest(const Node& spared);

  const storage::PrefixCosts costs_;
  const uint64_t capacity_, spacing_;
  absl::flat_hash_map<std::vector<int32_t>, int32_t> pages_;
  Tree tree_;
  absl::btree_set<Leaf> leaves_;
  uint64_t now_ = 0, serials_ = 0;
  Usage usage_;
};

}  // namespace ashlar::replay
