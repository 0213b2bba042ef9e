// SPDX-License-Identifier: Apache-2.0
// The published policies that are compared with, with their faults mended: no byte beyond the capacity, an eviction
// counts the bytes that it evicts, and an entry that does not fit alone is refused.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/btree_set.h"
#include "storage/prefix/prefix_entry.h"
#include "storage/prefix/prefix_tree.h"
#include "tools/replay/policy.h"

namespace ashlar::replay {

// Marconi (Pan and others, 2025): a state at the end of every request, and at each point where prompts diverge, once a
// second one does. Every node of the tree has a state, and prompts resume only at nodes. Evicts the node with the least
// S = recency + α · FLOP efficiency, both normalised over the candidates.
class MarconiPolicy final : public Policy {
 public:
  enum class Mode : uint8_t {
    kLru,    // SGLang+: the same admission; evicts the least recently used leaf; a use touches all nodes on the path
    kFixed,  // the given α
    kTuned,  // α is 0 until the first eviction. Once five times as many requests have been seen, α becomes the value
             // that would have saved the most FLOPs on all of them.
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

  // Returns how many tokens are known, and the node at their end; counts as a use of them.
  Tree::Reached Use(std::span<const int32_t> tokens);
  void Insert(std::span<const int32_t> tokens);
  bool Evict();
  std::vector<Node*> Candidates() const;
  Node* Cheapest(const std::vector<Node*>& candidates) const;
  double Efficiency(const Node& node) const;
  void Tune();

  static constexpr size_t kWindow = 5;    // multiple of the requests before the first eviction
  static constexpr size_t kScored = 500;  // number of last requests of the window by which α is chosen
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

// A state after every fixed number of tokens, from the first visit on; pages of one token; evicts the least recently
// used leaf.
class BlockPolicy final : public Policy {
 public:
  BlockPolicy(const storage::PrefixCosts& costs, uint64_t capacity_bytes, uint64_t spacing)
      : costs_(costs), capacity_(capacity_bytes), spacing_(spacing) {}

  uint64_t Request(std::span<const int32_t> tokens, uint64_t prompt) override;
  Usage usage() const override { return usage_; }

 private:
  struct Data {
    uint64_t used = 0;
    uint64_t serial = 0;
  };
  // One edge per page: a page is either complete or absent.
  using Tree = storage::PrefixTree<Data>;
  using Node = Tree::Node;
  struct Leaf {
    uint64_t used, serial;
    Node* node;
    bool operator<(const Leaf& other) const { return used != other.used ? used < other.used : serial < other.serial; }
  };

  bool HasState(const Node& node) const { return node.depth() % spacing_ == 0; }
  bool Append(Node*& at, int32_t page);
  void Touch(Node& node);
  bool EvictOldest(const Node& spared);

  const storage::PrefixCosts costs_;
  const uint64_t capacity_, spacing_;
  Tree tree_;
  absl::btree_set<Leaf> leaves_;
  uint64_t now_ = 0, serials_ = 0;
  Usage usage_;
};

// What engines do today: a tree of known pages, and states at the ends of the prompt and of the request, and where the
// known pages end. So a shared prefix gets its state at its second request. States and pages are evicted separately:
// pages from the leaves, states anywhere.
class EnginePolicy final : public Policy {
 public:
  struct Rules {
    bool by_page = false;    // a leaf is evicted page by page, otherwise as a whole
    bool two_pools = false;  // states have a part of the capacity; a leaf without a state is evicted
    // Evicts the least uses × exp(−decay × age in requests) / (depth + 1); without a value, the least recently used.
    std::optional<double> decay;
    uint64_t retention = 0;  // pages: computed tokens also get a state at each multiple; 0: no such states
  };
  EnginePolicy(const storage::PrefixCosts& costs, uint64_t capacity_bytes, const Rules& rules);

  uint64_t Request(std::span<const int32_t> tokens, uint64_t prompt) override;
  Usage usage() const override { return usage_; }

 private:
  struct Data {
    uint64_t used = 0;
    uint32_t uses = 0;
    bool state = false;
    double score = 0, state_score = 0;
    uint64_t serial = 0;
  };
  using Tree = storage::PrefixTree<Data>;
  using Node = Tree::Node;
  struct Item {
    double score;
    uint64_t depth, serial;
    Node* node;
    bool operator<(const Item& other) const {
      if (score != other.score) return score < other.score;
      return depth != other.depth ? depth > other.depth : serial < other.serial;  // the end of a text first
    }
  };
  using Order = absl::btree_set<Item>;

  static Item Leaf(Node& node) { return {node.data.score, node.depth(), node.data.serial, &node}; }
  static Item State(Node& node) { return {node.data.state_score, node.depth(), node.data.serial, &node}; }
  double Score(const Node& node) const;
  void Insert(std::span<const int32_t> tokens, uint64_t known, std::span<const uint64_t> depths);
  bool MakeSpace(uint64_t pages, uint64_t states);
  Order::iterator Oldest(Order& order) const;  // not used by the current request
  void DropState(Node& node);
  void EvictLeaf(Node& leaf);

  static constexpr double kStatesShare = 0.9 / 1.9;  // the share of two pools at SGLang's default ratio

  const storage::PrefixCosts costs_;
  const Rules rules_;
  const uint64_t capacity_, states_capacity_, pages_capacity_;
  Tree tree_;
  Order leaves_, states_;
  uint64_t pages_bytes_ = 0, states_bytes_ = 0;
  uint64_t now_ = 0, serials_ = 0;
  Usage usage_;
};

}  // namespace ashlar::replay
