// SPDX-License-Identifier: Apache-2.0
// Objects on other nodes: adoption and release. Also reports of this node's objects, and walks over all objects.
#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

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
                      .was = std::exchange(entry.resided, entry.resides),
                      .level = entry.resides_at,
                      .was_level = std::exchange(entry.resided_at, entry.resides_at)});
}

bool ObjectTable::TellAll(Telling& telling, Slice& slice) {
  if (telling.last == 0) telling.last = newest();  // later objects are reported when they appear
  return Walk(telling.after, telling.last, slice, [&](Entry& entry) {
    if (entry.gone != MissReason::kNone || entry.resides == TierKind::kNone) return true;
    if (telling.lost) entry.told = TierKind::kNone;
    Reside(entry);
    return true;
  });
}

void ObjectTable::SetTimeToLive(TenantId tenant, Nanos ttl) {
  if (ttls_.contains(tenant)) {
    ttls_[tenant] = ttl;
    return;
  }
  if (ttl == 0) return;
  ttls_[tenant] = ttl;
  // The earlier objects, longest unused first.
  std::vector<std::pair<Nanos, Entry*>> here;
  for (const auto& [id, entry] : entries_) {
    if (entry->pool.tenant == tenant && entry->ready && entry->gone == MissReason::kNone) {
      here.emplace_back(entry->last_used_at, entry.get());
    }
  }
  std::ranges::stable_sort(here, {}, &std::pair<Nanos, Entry*>::first);
  std::list<ObjectId>& order = by_use_[tenant];
  for (const auto& [used, entry] : here) entry->by_use = order.insert(order.end(), entry->id);
}

bool ObjectTable::Walk(ObjectId& after, ObjectId last, Slice& slice, absl::FunctionRef<bool(Entry&)> visit) {
  while (true) {
    const auto next = entries_.upper_bound(after);
    if (next == entries_.end() || next->first > last) return true;
    if (!slice.Take()) return false;
    after = next->first;
    Entry& entry = *next->second;
    if (!visit(entry)) return true;
  }
}

void ObjectTable::Erase(ObjectId id) {
  Entry* const found = Living(id);
  if (found == nullptr) return;
  const TenantId tenant = found->pool.tenant;
  const Key key = found->header.key;
  for (Entry* shard : segments_.All(tenant, key)) shard->erased = true;
  if (found->ready) Unlink(*found, MissReason::kEvicted, PolicyKind::kOperator, placement_.Nearest(*found));
  ghosts_.Erase(tenant, key);
}

bool ObjectTable::Shred(ObjectId id) {
  if (!OnDisk(id)) return false;
  entries_.at(id)->erased = true;
  return true;
}

bool ObjectTable::OnDisk(ObjectId id) const {
  const auto found = entries_.find(id);
  return found != entries_.end() && found->second->gone != MissReason::kNone && placement_.OnDisk(*found->second);
}

}  // namespace ashlar::storage
