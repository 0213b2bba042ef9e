// SPDX-License-Identifier: Apache-2.0
#include "daemon/engine/repeated_pages.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace ashlar::daemon {

RepeatedPages::RepeatedPages(std::span<const int32_t> page_table) {
  absl::flat_hash_set<int32_t> seen;
  absl::flat_hash_map<int32_t, uint32_t> repeated;  // index in claimed_by_
  seen.reserve(page_table.size());
  for (const int32_t page : page_table) {
    if (page >= 0 && !seen.insert(page).second) repeated.emplace(page, static_cast<uint32_t>(repeated.size()));
  }
  if (repeated.empty()) return;
  for (uint32_t i = 0; i < page_table.size(); ++i) {
    const auto found = repeated.find(page_table[i]);
    if (found != repeated.end()) entries_.push_back({i, found->second});
  }
  claimed_by_.assign(repeated.size(), kUnclaimed);
}

std::optional<RepeatedPages::Conflict> RepeatedPages::Claim(uint64_t first, uint64_t last) {
  for (auto entry = std::ranges::lower_bound(entries_, first, {}, &Entry::index);
       entry != entries_.end() && entry->index < last; ++entry) {
    uint32_t& holder = claimed_by_[entry->page];
    if (holder != kUnclaimed && holder != entry->index) return Conflict{entry->index, holder};
    holder = entry->index;
  }
  return std::nullopt;
}

}  // namespace ashlar::daemon
