// SPDX-License-Identifier: Apache-2.0
// Recounts what is kept for prefixes from the tree alone, by the simplest algorithm.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "storage/prefix/prefix_entry.h"

namespace ashlar::storage {

struct PrefixRecount {
  uint64_t bytes = 0;
  std::vector<const PrefixNode*> nodes;  // all but the root; a parent before its children
  std::vector<const PrefixNode*> kept;
  size_t spans = 0;        // number of kept spans
  bool needs_hold = true;  // every edge's count of users of its pages is right
  bool spans_hold = true;  // every span continues kept states, and states list exactly the spans that continue them
};

inline bool KeptByStates(const PrefixNode& node) {
  return node.data.kept && node.data.span == nullptr;
}
inline bool KeptAtOrBehind(const PrefixNode& node) {  // compares states: spans need no pages
  bool kept = KeptByStates(node);
  node.ForEachChild([&](const PrefixNode& child) { kept = kept || KeptAtOrBehind(child); });
  return kept;
}
inline bool HangsAsItShould(const PrefixNode& node) {
  const PrefixNode* base = node.parent();
  while (base != nullptr && base != node.data.span->base) base = base->parent();
  return base != nullptr && KeptByStates(*base) && std::ranges::count(base->data.hanging, &node) == 1;
}

// For small trees, no deeper than a stack can be: every node visits all nodes below it.
inline PrefixRecount Recount(const PrefixNode& root, const PrefixCosts& costs) {
  PrefixRecount count;
  size_t hanging = 0;
  std::vector<const PrefixNode*> open = {&root};
  while (!open.empty()) {
    const PrefixNode& node = *open.back();
    open.pop_back();
    uint64_t needs = KeptByStates(node) ? 1 : 0;
    node.ForEachChild([&](const PrefixNode& child) {
      open.push_back(&child);
      needs += KeptAtOrBehind(child) ? 1 : 0;
    });
    if (node.parent() == nullptr) continue;
    count.nodes.push_back(&node);
    count.needs_hold = count.needs_hold && node.data.needs == needs;
    // Every page that ends in its edge; of a checkpoint, states and the tail that is no whole page.
    for (uint64_t depth = node.begin() + 1; needs > 0 && depth <= node.depth(); ++depth) {
      if (depth % costs.page_tokens == 0) count.bytes += costs.page_bytes;
    }
    count.spans_hold = count.spans_hold && (node.data.kept || node.data.span == nullptr);
    hanging += node.data.hanging.size();
    if (!node.data.kept) continue;
    count.kept.push_back(&node);
    if (node.data.span != nullptr) {
      ++count.spans;
      count.spans_hold = count.spans_hold && HangsAsItShould(node);
      count.bytes += node.data.span->bytes;
      continue;
    }
    count.bytes += costs.checkpoint_bytes;
    if (node.depth() % costs.page_tokens != 0) count.bytes += costs.page_bytes;
  }
  count.spans_hold = count.spans_hold && hanging == count.spans;
  return count;
}

}  // namespace ashlar::storage
