// SPDX-License-Identifier: Apache-2.0
// Levels of a bundle's shards, by rank.
#include <algorithm>
#include <utility>

#include "storage/objects/object_table.h"

namespace ashlar::storage {

ObjectTable::Reference ObjectTable::Shard(const Reference& object, const TensorShard& shard) {
  if (object->gone != MissReason::kNone) return {};
  Entry* entry = segments_.Find(object->pool.tenant, object->header.key, shard);
  if (entry == nullptr || !entry->ready) return {};
  return Reference(*entry, LevelOf(*entry));
}

ObjectTable::Result ObjectTable::ShardAt(const Reference& object, const TensorShard& shard, size_t level) {
  Remember(object->pool.tenant, object->header.ns, shard, level);
  if (object->gone != MissReason::kNone) return {.reason = object->gone};
  Entry* const entry = segments_.Find(object->pool.tenant, object->header.key, shard);
  if (entry == nullptr || !entry->ready) return {.reason = MissReason::kEvicted};
  Result result{.tier = placement_.NearestTo(*entry, level), .object = Reference(*entry, level)};
  if (result.object.copy().state != Copy::State::kNone) return result;
  // The lookup's reference keeps it at its rank's expected level.
  const MissReason refused = placement_.Promote(*entry, level, {}, clock_.Now());
  if (refused != MissReason::kNone) return {.reason = refused};
  placement_.Pump();
  return result;
}

size_t ObjectTable::LevelOf(const Entry& entry) const {
  if (placement_.beside() == 1) return placement_.common();
  const auto found = levels_.find({entry.pool.tenant, entry.header.ns, entry.header.shard.rank});
  return found == levels_.end() ? placement_.common() : found->second;
}

void ObjectTable::Remember(TenantId tenant, const NamespaceId& ns, const TensorShard& shard, size_t level) {
  if (placement_.beside() == 1 || shard.size == 1) return;
  if (levels_.size() >= kMaxRanks) levels_.clear();  // bounds the map, because namespaces come and go
  levels_[{tenant, ns, shard.rank}] = level;
}

}  // namespace ashlar::storage
