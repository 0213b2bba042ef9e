#include "storage/index/segment_table.h"

namespace ashlar::storage {

Entry* SegmentTable::Find(TenantId tenant, const Key& key) const {
  const auto found = entries_.find(Id(tenant, key));
  return found == entries_.end() ? nullptr : found->second;
}

MissReason SegmentTable::WhyGone(TenantId tenant, const Key& key) const {
  const auto found = ghost_places_.find(Id(tenant, key));
  return found == ghost_places_.end() ? MissReason::kNeverSeen : found->second->why;
}

void SegmentTable::Insert(Entry& entry) {
  const Id id(entry.tenant, entry.header.key);
  ForgetGhost(id);
  entries_.emplace(id, &entry);
}

void SegmentTable::Remove(const Entry& entry, MissReason why) {
  const Id id(entry.tenant, entry.header.key);
  entries_.erase(id);
  if (max_ghosts_ == 0) return;
  if (ghosts_.size() == max_ghosts_) ForgetGhost(Id(ghosts_.front().id));
  ghost_places_[id] = ghosts_.insert(ghosts_.end(), {id, why});
}

void SegmentTable::ForgetGhost(const Id& id) {
  const auto found = ghost_places_.find(id);
  if (found == ghost_places_.end()) return;
  ghosts_.erase(found->second);
  ghost_places_.erase(found);
}

}  // namespace ashlar::storage
