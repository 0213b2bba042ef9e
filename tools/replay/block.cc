// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "tools/replay/published.h"

namespace ashlar::replay {

uint64_t BlockPolicy::Request(std::span<const int32_t> pages, uint64_t prompt) {
  ++now_;
  uint64_t resumed = 0;
  const auto known = tree_.Walk(pages, [&](Node& node) {
    if (HasState(node) && node.depth() <= prompt) resumed = node.depth();
    Touch(node);
  });
  Node* at = known.node;
  for (size_t next = known.depth; next < pages.size() && Append(at, pages[next]); ++next) {
  }
  return resumed;
}

bool BlockPolicy::Append(Node*& at, int32_t page) {
  const bool state = (at->depth() + 1) % spacing_ == 0;
  const uint64_t bytes = costs_.page_bytes + (state ? costs_.checkpoint_bytes : 0);
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
  usage_.bytes -= costs_.page_bytes;
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
