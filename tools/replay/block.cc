// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "tools/replay/published.h"

namespace ashlar::replay {

BlockPolicy::BlockPolicy(const storage::PrefixCosts& costs, uint64_t capacity_bytes, uint64_t spacing)
    : costs_(costs), capacity_(capacity_bytes), spacing_(spacing) {}

std::vector<int32_t> BlockPolicy::Pages(std::span<const int32_t> tokens) {
  std::vector<int32_t> pages;
  for (size_t begin = 0; begin + kPageTokens <= tokens.size(); begin += kPageTokens) {
    const auto page = tokens.subspan(begin, kPageTokens);
    const auto number = static_cast<int32_t>(pages_.size());
    pages.push_back(pages_.try_emplace({page.begin(), page.end()}, number).first->second);
  }
  return pages;
}

uint64_t BlockPolicy::Request(std::span<const int32_t> tokens, uint64_t prompt) {
  ++now_;
  const std::vector<int32_t> pages = Pages(tokens);
  const uint64_t prompts = prompt / kPageTokens;
  uint64_t resumed = 0;
  const auto known = tree_.Walk(pages, [&](Node& node) {
    if (HasState(node) && node.depth() <= prompts) resumed = node.depth() * kPageTokens;
    Touch(node);
  });
  Node* at = known.node;
  for (size_t next = known.depth; next < pages.size() && Append(at, pages[next]); ++next) {
  }
  return resumed;
}

bool BlockPolicy::Append(Node*& at, int32_t page) {
  const bool state = (at->depth() + 1) * kPageTokens % spacing_ == 0;
  const uint64_t bytes = kPageTokens / costs_.page_tokens * costs_.page_bytes + (state ? costs_.checkpoint_bytes : 0);
  while (usage_.bytes + bytes > capacity_ && EvictOldest(*at)) {
  }
  if (usage_.bytes + bytes > capacity_) {
    ++usage_.refusals;
    return false;
  }
  leaves_.erase({at->data.used, at->data.serial, at});
  at = &tree_.Append(*at, {&page, 1});
  at->data = {.used = now_, .serial = ++serials_};
  leaves_.insert({now_, at->data.serial, at});
  usage_.bytes += bytes;
  usage_.states += state ? 1 : 0;
  usage_.peak_bytes = std::max(usage_.peak_bytes, usage_.bytes);
  return true;
}

void BlockPolicy::Touch(Node& node) {
  const bool leaf = leaves_.erase({node.data.used, node.data.serial, &node}) > 0;
  node.data.used = now_;
  if (leaf) leaves_.insert({now_, node.data.serial, &node});
}

bool BlockPolicy::EvictOldest(const Node& spared) {
  auto oldest = leaves_.begin();
  if (oldest != leaves_.end() && oldest->node == &spared) ++oldest;
  if (oldest == leaves_.end()) return false;
  Node& node = *oldest->node;
  leaves_.erase(oldest);
  usage_.bytes -= kPageTokens / costs_.page_tokens * costs_.page_bytes;
  if (HasState(node)) {
    usage_.bytes -= costs_.checkpoint_bytes;
    --usage_.states;
    ++usage_.evictions;
  }
  Node& parent = *node.parent();
  tree_.Remove(node);
  if (parent.parent() != nullptr && parent.leaf()) leaves_.insert({parent.data.used, parent.data.serial, &parent});
  return true;
}

}  // namespace ashlar::replay
