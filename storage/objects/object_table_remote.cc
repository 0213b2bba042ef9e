// Objects that other nodes have, taken in and let go; and what others are told of this node's.
#include <algorithm>
#include <functional>
#include <utility>

#include "storage/objects/object_table.h"

namespace ashlar::storage {

bool ObjectTable::AdoptRemote(const TenantPool& pool, ObjectHeader header, RemoteCopyId copy, Nanos cost) {
  if (segments_.Find(pool.tenant, header.key, header.shard) != nullptr) return false;
  Entry& entry = Make(pool, std::move(header), 0);
  segments_.Insert(entry);
  Appear(entry);
  placement_.AdoptRemote(entry, copy, cost);
  return true;
}

void ObjectTable::SettleRemote(TenantId tenant, const Key& key, const TensorShard& shard) {
  if (Entry* entry = segments_.Find(tenant, key, shard)) placement_.Changed(*entry);
}

void ObjectTable::Reside(Entry& entry) const {
  if (!tell_) return;
  entry.told = tell_(entry.pool, entry.header,
                     {.nearest = entry.resides,
                      .saved = entry.saved,
                      .uses = entry.uses,
                      .told = entry.told,
                      .was = std::exchange(entry.resided, entry.resides)});
}

bool ObjectTable::TellAll(Slice& slice) {
  if (untold_.empty()) {
    for (const auto& [id, entry] : entries_) untold_.push_back(id);
    std::ranges::sort(untold_, std::ranges::greater());
  }
  for (; !untold_.empty(); untold_.pop_back()) {
    if (!slice.Take()) return false;
    Entry* const entry = Living(untold_.back());
    if (entry == nullptr || entry->resides == TierKind::kNone) continue;
    entry->told = TierKind::kNone;
    Reside(*entry);
  }
  return true;
}

}  // namespace ashlar::storage
