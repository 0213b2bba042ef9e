// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/checkpoint_prices.h"

namespace ashlar::storage {

const PrefixNode& CheckpointPrices::Before(const PrefixNode& node) {
  const PrefixNode* at = node.parent();
  while (at->parent() != nullptr && !at->data.kept) at = at->parent();
  return *at;
}

// Returns the deepest ancestor whose pages are kept independently of this checkpoint, or the root.
const PrefixNode& CheckpointPrices::Paged(const PrefixNode& node) {
  const uint32_t own = node.data.kept && node.data.span == nullptr ? 1 : 0;
  const PrefixNode* at = &node;
  while (at->parent() != nullptr && at->data.needs == own) at = at->parent();
  return *at;
}

uint64_t CheckpointPrices::Bytes(const PrefixNode& node, const PrefixNode& paged) const {
  if (node.data.span != nullptr) return node.data.span->bytes;
  const uint64_t pages = node.depth() / costs_.page_tokens - paged.depth() / costs_.page_tokens;
  return StateBytes(node) + pages * costs_.page_bytes;
}

double CheckpointPrices::Worth(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged) const {
  const double saved = costs_.Flops(node.depth()) - costs_.Flops(before.depth());
  return saved / static_cast<double>(Bytes(node, paged));
}

double CheckpointPrices::Price(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged,
                               RequestTime now) const {
  const PrefixEntry& entry = node.data;
  return model_.Rate({*entry.kind, entry.uses, entry.fresh}, now - entry.used) * Worth(node, before, paged);
}

// None of them is kept, so all have the same checkpoint before them. A node after the first one without needs has none
// either.
std::vector<double> CheckpointPrices::Prices(std::span<const PrefixNode* const> way, RequestTime now) const {
  std::vector<double> prices;
  if (way.empty()) return prices;
  const PrefixNode& before = Before(*way.front());
  const PrefixNode* paged = nullptr;  // for nodes without needs
  for (const PrefixNode* node : way) {
    if (node->data.needs == 0 && paged == nullptr) paged = &Paged(*node);
    prices.push_back(Price(*node, before, node->data.needs == 0 ? *paged : *node, now));
  }
  return prices;
}

}  // namespace ashlar::storage
