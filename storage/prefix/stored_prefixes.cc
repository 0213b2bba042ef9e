// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/stored_prefixes.h"

#include <algorithm>
#include <span>
#include <vector>

namespace ashlar::storage {

bool IsOnDisk(const ObjectTable& table, TenantId tenant, const Key& key, const TensorShard& shard) {
  const Entry* const entry = table.index().keys().Find(tenant, key, shard);
  return entry != nullptr && table.levels().OnDisk(*entry);
}

// All shards must be present. Ranks commit one after the other.
StoredPrefixes::There StoredPrefixes::Find(TenantId tenant, const Key& key, const TensorShard& shard) const {
  const Entry* const entry = table_.index().keys().Find(tenant, key, shard);
  if (entry == nullptr) return There::kGone;
  if (!entry->ready) return There::kComing;
  if (shard.size == 1) return There::kWhole;
  const std::vector<Entry*> all = table_.index().keys().All(tenant, key);
  if (all.size() == shard.size && std::ranges::all_of(all, &Entry::ready)) return There::kWhole;
  return clock_.Now() - entry->published_at < kRanks ? There::kComing : There::kGone;
}

size_t StoredPrefixes::WholeBlocks(TenantId tenant, const PrefixModel& model, const PrefixKeys& keys) const {
  const std::span<const Key> blocks = keys.blocks();
  if (!model.paged) return blocks.size();
  const auto missing =
      std::ranges::find_if(blocks, [&](const Key& key) { return Find(tenant, key, model.shard) != There::kWhole; });
  return static_cast<size_t>(missing - blocks.begin());
}

StoredPrefixes::There StoredPrefixes::FindState(TenantId tenant, const PrefixModel& model, const PrefixKeys& keys,
                                                uint64_t depth, size_t& whole) const {
  const Key checkpoint = keys.Checkpoint(depth);
  if (copying_.contains(checkpoint)) return There::kComing;
  const size_t needed = model.paged ? depth / model.block_tokens : 0;
  for (; whole < needed; ++whole) {
    const There block = Find(tenant, keys.blocks()[whole], model.shard);
    if (block != There::kWhole) return block;
  }
  return Find(tenant, checkpoint, model.shard);
}

StoredPrefixes::There StoredPrefixes::FindSpan(TenantId tenant, const PrefixModel& model, const Key& key) const {
  return copying_.contains(key) ? There::kComing : Find(tenant, key, model.shard);
}

bool StoredPrefixes::EndCopy(const Key& key) {
  const auto copying = copying_.find(key);
  if (--copying->second > 0) return false;
  copying_.erase(copying);
  return true;
}

}  // namespace ashlar::storage
