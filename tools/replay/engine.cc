// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "tools/replay/published.h"

namespace ashlar::replay {

EnginePolicy::EnginePolicy(const storage::PrefixCosts& costs, uint64_t capacity_bytes, const Rules& rules)
    : costs_(costs),
      rules_(rules),
      capacity_(capacity_bytes),
      states_capacity_(rules.two_pools ? static_cast<uint64_t>(static_cast<double>(capacity_bytes) * kStatesShare)
                                       : capacity_bytes),
      pages_capacity_(rules.two_pools ? capacity_bytes - states_capacity_ : capacity_bytes) {}

uint64_t EnginePolicy::Request(std::span<const int32_t> tokens, uint64_t prompt) {
  ++now_;
  Node* resume = nullptr;
  const auto touch = [this](Node& node) {
    const bool leaf = leaves_.erase(Leaf(node)) > 0;
    node.data.used = now_;
    ++node.data.uses;
    node.data.score = Score(node);
    if (leaf) leaves_.insert(Leaf(node));
  };
  const auto reached = tree_.Walk(tokens, [&](Node& node) {
    touch(node);
    if (node.data.state && node.depth() <= prompt) resume = &node;
  });
  if (reached.inside != nullptr) touch(*reached.inside);
  if (resume != nullptr) {
    states_.erase(State(*resume));
    resume->data.state_score = Score(*resume);
    states_.insert(State(*resume));
  }
  const uint64_t resumed = resume == nullptr ? 0 : resume->depth();
  // States are captured where the known pages end, and at the ends of the prompt and of the request.
  std::vector<uint64_t> depths = {std::min<uint64_t>(reached.depth, prompt), prompt, tokens.size()};
  for (uint64_t depth = rules_.retention; depth > 0 && depth < tokens.size(); depth += rules_.retention) {
    depths.push_back(depth);
  }
  std::ranges::sort(depths);
  const auto again = std::ranges::unique(depths);
  depths.erase(again.begin(), again.end());
  std::erase_if(depths, [resumed](uint64_t depth) { return depth <= resumed; });
  if (!depths.empty()) Insert(tokens, reached.depth, depths);
  return resumed;
}

void EnginePolicy::Insert(std::span<const int32_t> tokens, uint64_t known, std::span<const uint64_t> depths) {
  const std::vector<Node*> way = tree_.Way(tokens);
  const auto has_state = [&](uint64_t depth) {
    const Node* const node = Tree::NodeOn(way, depth);
    return node != nullptr && node->data.state;
  };
  const auto states = static_cast<uint64_t>(depths.size() - std::ranges::count_if(depths, has_state));
  const uint64_t pages = tokens.size() - known;
  if (!MakeSpace(pages * costs_.page_bytes, states * costs_.checkpoint_bytes)) {
    ++usage_.refusals;
    return;
  }
  std::vector<uint64_t> cuts(depths.begin(), depths.end());
  if (rules_.by_page) {
    for (uint64_t depth = known + 1; depth <= tokens.size(); ++depth) cuts.push_back(depth);
    std::ranges::sort(cuts);
    const auto again = std::ranges::unique(cuts);
    cuts.erase(again.begin(), again.end());
  }
  if (pages > 0 && !way.empty()) leaves_.erase(Leaf(*way.back()));
  Node* node = tree_.Insert(tokens, cuts).node;
  for (bool leaf = node->leaf(); node->parent() != nullptr; node = node->parent(), leaf = false) {
    if (node->data.used == 0) node->data = {.used = now_, .uses = 1, .serial = ++serials_};
    node->data.score = Score(*node);
    if (leaf) leaves_.insert(Leaf(*node));
    if (node->data.state || !std::ranges::binary_search(depths, node->depth())) continue;
    node->data.state = true;
    node->data.state_score = node->data.score;
    states_.insert(State(*node));
    ++usage_.states;
    states_bytes_ += costs_.checkpoint_bytes;
  }
  pages_bytes_ += pages * costs_.page_bytes;
  usage_.bytes = pages_bytes_ + states_bytes_;
  usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.bytes);
}

double EnginePolicy::Score(const Node& node) const {
  const auto used = static_cast<double>(node.data.used);
  if (!rules_.decay) return used;
  // The logarithm of uses × exp(−decay × age) / (depth + 1), less a term that all nodes have in common.
  return std::log(static_cast<double>(node.data.uses)) + *rules_.decay * used -
         std::log(static_cast<double>(node.depth()) + 1);
}

bool EnginePolicy::MakeSpace(uint64_t pages, uint64_t states) {
  while (true) {
    const bool pages_fit = pages_bytes_ + pages <= pages_capacity_;
    const bool states_fit = states_bytes_ + states <= states_capacity_;
    if (pages_fit && states_fit && pages_bytes_ + states_bytes_ + pages + states <= capacity_) return true;
    const auto leaf = rules_.two_pools && pages_fit ? leaves_.end() : Oldest(leaves_);
    const auto state = rules_.two_pools && states_fit ? states_.end() : Oldest(states_);
    if (leaf == leaves_.end() && state == states_.end()) return false;
    if (state == states_.end() || (leaf != leaves_.end() && leaf->score <= state->score)) {
      EvictLeaf(*leaf->node);
    } else {
      Node& node = *state->node;
      DropState(node);
      if (rules_.two_pools && node.leaf()) EvictLeaf(node);
    }
  }
}

EnginePolicy::Order::iterator EnginePolicy::Oldest(Order& order) const {
  return std::ranges::find_if(order, [this](const Item& item) { return item.node->data.used != now_; });
}

void EnginePolicy::DropState(Node& node) {
  states_.erase(State(node));
  node.data.state = false;
  states_bytes_ -= costs_.checkpoint_bytes;
  --usage_.states;
  ++usage_.evictions;
}

void EnginePolicy::EvictLeaf(Node& leaf) {
  if (leaf.data.state) DropState(leaf);
  leaves_.erase(Leaf(leaf));
  pages_bytes_ -= leaf.edge().size() * costs_.page_bytes;
  Node& parent = *leaf.parent();
  tree_.Remove(leaf);
  if (parent.parent() == nullptr || !parent.leaf()) return;
  leaves_.insert(Leaf(parent));
  if (rules_.two_pools && !parent.data.state && parent.data.used != now_) EvictLeaf(parent);
}

}  // namespace ashlar::replay
