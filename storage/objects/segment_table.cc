// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/segment_table.h"

#include <algorithm>
#include <iterator>

namespace ashlar::storage {

Entry* SegmentTable::Find(TenantId tenant, const Key& key, const TensorShard& shard) const {
  if (shard.size == 1) {
    const auto found = whole_.find(Id(tenant, key));
    return found == whole_.end() ? nullptr : found->second;
  }
  const auto found = shards_.find(Id(tenant, key));
  if (found == shards_.end()) return nullptr;
  const auto entry = std::ranges::find_if(found->second, [&](const Entry* e) { return e->header.shard == shard; });
  return entry == found->second.end() ? nullptr : *entry;
}

std::vector<Entry*> SegmentTable::All(TenantId tenant, const Key& key) const {
  std::vector<Entry*> all;
  if (Entry* whole = Find(tenant, key, {})) all.push_back(whole);
  if (const auto found = shards_.find(Id(tenant, key)); found != shards_.end()) {
    all.insert(all.end(), found->second.begin(), found->second.end());
  }
  return all;
}

std::vector<Entry*> SegmentTable::Bundle(TenantId tenant, const Key& key, uint32_t size) const {
  std::vector<Entry*> bundle;
  const auto found = shards_.find(Id(tenant, key));
  if (found == shards_.end()) return bundle;
  std::ranges::copy_if(found->second, std::back_inserter(bundle),
                       [size](const Entry* entry) { return entry->header.shard.size == size; });
  return bundle;
}

void SegmentTable::Insert(Entry& entry) {
  const Id id(entry.pool.tenant, entry.header.key);
  if (entry.header.shard.size == 1) {
    whole_.emplace(id, &entry);
  } else {
    shards_[id].push_back(&entry);
  }
}

void SegmentTable::Remove(const Entry& entry) {
  const Id id(entry.pool.tenant, entry.header.key);
  if (entry.header.shard.size == 1) {
    whole_.erase(id);
    return;
  }
  const auto found = shards_.find(id);
  std::erase(found->second, &entry);
  if (found->second.empty()) shards_.erase(found);
}

}  // namespace ashlar::storage
