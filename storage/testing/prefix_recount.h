// What is kept for prefixes, counted anew from the tree alone, as plainly as possible.
#pragma once

#include <cstdint>
#include <vector>

#include "storage/prefix_entry.h"

namespace ashlar::storage {

struct PrefixRecount {
  uint64_t bytes = 0;
  std::vector<const PrefixNode*> nodes;  // all but the root; a parent before its children
  std::vector<const PrefixNode*> kept;
  bool needs_hold = true;  // what edges say of who needs their pages
};

inline bool KeptAtOrBehind(const PrefixNode& node) {
  bool kept = node.data.kept;
  node.ForEachChild([&](const PrefixNode& child) { kept = kept || KeptAtOrBehind(child); });
  return kept;
}

// Of trees that are no deeper than a stack can be, and small: every node looks at all behind it.
inline PrefixRecount Recount(const PrefixNode& root, const PrefixCosts& costs) {
  PrefixRecount count;
  std::vector<const PrefixNode*> open = {&root};
  while (!open.empty()) {
    const PrefixNode& node = *open.back();
    open.pop_back();
    uint64_t needs = node.data.kept ? 1 : 0;
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
    if (!node.data.kept) continue;
    count.kept.push_back(&node);
    count.bytes += costs.checkpoint_bytes;
    if (node.depth() % costs.page_tokens != 0) count.bytes += costs.page_bytes;
  }
  return count;
}

}  // namespace ashlar::storage
