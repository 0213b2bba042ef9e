// SPDX-License-Identifier: Apache-2.0
#include "storage/upkeep/inventory.h"

#include <algorithm>
#include <utility>

namespace ashlar::storage {
namespace {

constexpr ObjectId kAll = ~ObjectId{0};

}  // namespace

bool Inventory::Has(const Selection& selection, const Entry& entry) {
  return entry.gone == MissReason::kNone && (!selection.tenant || entry.pool.tenant == *selection.tenant) &&
         (!selection.ns || entry.header.ns == *selection.ns) &&
         (!selection.kind || entry.header.kind == *selection.kind);
}

bool Inventory::HasTier(const Selection& selection, const Entry& entry) const {
  return selection.tier == TierKind::kNone || std::ranges::count(table_.levels().TiersOf(&entry), selection.tier) > 0;
}

bool Inventory::List(const Selection& selection, size_t most, ObjectId& after, std::vector<Listed>& page,
                     Slice& slice) const {
  const Nanos now = clock_.Now();
  bool full = page.size() >= most;
  const bool ended = full || table_.index().Walk(after, kAll, slice, [&](Entry& entry) {
    if (!entry.ready || !Has(selection, entry) || !HasTier(selection, entry)) return true;
    page.push_back({.id = entry.id,
                    .pool = entry.pool,
                    .ns = entry.header.ns,
                    .key = entry.header.key,
                    .kind = entry.header.kind,
                    .shard = entry.header.shard,
                    .tokens = entry.header.tokens,
                    .bytes = entry.header.bytes,
                    .tiers = table_.levels().TiersOf(&entry),
                    .uses = entry.uses,
                    .references = entry.references,
                    .pinned = entry.pinned,
                    .age = now - entry.published_at,
                    .idle = now - entry.last_used_at});
    full = page.size() >= most;
    return !full;
  });
  return ended && !full;
}

bool Inventory::Count(const Selection& selection, ObjectId& after, Tally& tally, Slice& slice) const {
  return table_.index().Walk(after, kAll, slice, [&](Entry& entry) {
    if (!entry.ready || !Has(selection, entry) || !HasTier(selection, entry)) return true;
    ++tally.objects;
    tally.bytes += entry.header.bytes;
    if (entry.references > 0) {
      ++tally.leased_objects;
      tally.leased_bytes += entry.header.bytes;
    }
    for (const TierKind tier : table_.levels().TiersOf(&entry)) {
      const auto place = static_cast<size_t>(tier);
      if (place < tally.tier_bytes.size()) tally.tier_bytes[place] += entry.header.bytes;
    }
    return true;
  });
}

}  // namespace ashlar::storage
