// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "tools/replay/published.h"

namespace ashlar::replay {

MarconiPolicy::MarconiPolicy(const storage::PrefixCosts& costs, uint64_t capacity_bytes, Mode mode, double alpha)
    : costs_(costs), capacity_(capacity_bytes), mode_(mode), alpha_(alpha) {
  tuning_.alpha = alpha;
}

MarconiPolicy::Tree::Reached MarconiPolicy::Use(std::span<const int32_t> tokens) {
  ++now_;
  const auto reached = tree_.Walk(tokens, [&](Node& node) {
    if (mode_ == Mode::kLru) node.data.used = now_;
  });
  if (mode_ == Mode::kLru) {
    if (reached.inside != nullptr) reached.inside->data.used = now_;
  } else {
    reached.node->data.used = now_;  // only the hit node (§4.3)
  }
  return reached;
}

uint64_t MarconiPolicy::Request(std::span<const int32_t> tokens, uint64_t prompt) {
  const uint64_t resumed = Use(tokens.first(prompt)).node->depth();
  ++requests_;
  if (mode_ == Mode::kTuned) {
    window_.push_back({{tokens.begin(), tokens.end()}, prompt});
    if (before_first_eviction_ > 0 && requests_ >= kWindow * before_first_eviction_) Tune();
  }
  Insert(tokens);
  return resumed;
}

// Space is freed before anything is inserted. The eviction may take nodes of the common prefix, so the common part is
// counted again.
void MarconiPolicy::Insert(std::span<const int32_t> tokens) {
  ++now_;
  auto reached = Use(tokens);
  const auto bytes = [&] {
    const uint64_t states = (reached.inside != nullptr ? 1 : 0) + (reached.depth < tokens.size() ? 1 : 0);
    return (tokens.size() - reached.depth) * costs_.page_bytes + states * costs_.checkpoint_bytes;
  };
  if (usage_.bytes + bytes() > capacity_) ++now_;
  while (usage_.bytes + bytes() > capacity_ && Evict()) reached = tree_.Walk(tokens);
  if (usage_.bytes + bytes() > capacity_) {
    ++usage_.refusals;
    return;
  }
  usage_.bytes += bytes();
  const auto inserted = tree_.Insert(tokens);
  if (inserted.parted) inserted.parted->node->data.used = now_;
  if (inserted.added) inserted.node->data.used = now_;
  usage_.states += (inserted.parted ? 1 : 0) + (inserted.added ? 1 : 0);
  usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.bytes);
}

bool MarconiPolicy::Evict() {
  if (before_first_eviction_ == 0) before_first_eviction_ = requests_;
  const std::vector<Node*> candidates = Candidates();
  if (candidates.empty()) return false;
  Node& victim = *Cheapest(candidates);
  ++usage_.evictions;
  --usage_.states;
  usage_.bytes -= costs_.checkpoint_bytes;
  if (victim.leaf()) {
    usage_.bytes -= victim.edge().size() * costs_.page_bytes;
    tree_.Remove(victim);
  } else {
    Node& child = victim.first_child();
    child.data.used = std::max(child.data.used, victim.data.used);
    tree_.Merge(victim);
  }
  return true;
}

std::vector<MarconiPolicy::Node*> MarconiPolicy::Candidates() const {
  std::vector<Node*> candidates, open = {&tree_.root()};
  while (!open.empty()) {
    Node& node = *open.back();
    open.pop_back();
    if (node.parent() != nullptr && node.children() <= (mode_ == Mode::kLru ? 0 : 1)) candidates.push_back(&node);
    node.ForEachChild([&](Node& child) { open.push_back(&child); });
  }
  return candidates;
}

// Relative to the node's parent (§4.2); over the bytes of the whole prefix, as published.
double MarconiPolicy::Efficiency(const Node& node) const {
  const double flops = costs_.Flops(node.depth()) - costs_.Flops(node.begin());
  return flops / static_cast<double>(costs_.checkpoint_bytes + node.depth() * costs_.page_bytes);
}

MarconiPolicy::Node* MarconiPolicy::Cheapest(const std::vector<Node*>& candidates) const {
  const auto older = [](const Node* a, const Node* b) { return a->data.used < b->data.used; };
  if (mode_ == Mode::kLru) return *std::min_element(candidates.begin(), candidates.end(), older);
  struct Range {
    double least = std::numeric_limits<double>::infinity(), most = -least;
    void Add(double value) { least = std::min(least, value), most = std::max(most, value); }
    double Normalised(double value) const { return most > least ? (value - least) / (most - least) : 1; }
  };
  const auto recency = [this](const Node& node) { return 1 / static_cast<double>(now_ - node.data.used); };
  Range recencies, efficiencies;
  for (const Node* node : candidates) {
    recencies.Add(recency(*node));
    efficiencies.Add(Efficiency(*node));
  }
  Node* cheapest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (Node* node : candidates) {
    const double score = alpha_ * efficiencies.Normalised(Efficiency(*node)) + recencies.Normalised(recency(*node));
    if (score >= least) continue;
    least = score;
    cheapest = node;
  }
  return cheapest;
}

// The window is replayed from an empty cache, once for every α of the grid (§4.2).
void MarconiPolicy::Tune() {
  double best = -1;
  for (int step = 0; step * kStep <= kMost + kStep / 2; ++step) {
    const double alpha = step * kStep;
    MarconiPolicy trial(costs_, capacity_, Mode::kFixed, alpha);
    double resumed = 0, tokens = 0, flops = 0;
    for (size_t i = 0; i < window_.size(); ++i) {
      const uint64_t skipped = trial.Request(window_[i].tokens, window_[i].prompt);
      if (window_.size() - i > kScored) continue;
      resumed += static_cast<double>(skipped);
      tokens += static_cast<double>(window_[i].prompt);
      flops += costs_.Flops(skipped);
    }
    tuning_.grid.push_back({alpha, resumed / tokens, flops});
    if (flops > best) {
      best = flops;
      alpha_ = tuning_.alpha = alpha;
    }
  }
  window_.clear();
  window_.shrink_to_fit();
  mode_ = Mode::kFixed;
}

}  // namespace ashlar::replay
