#include "storage/index/ghost_table.h"

namespace ashlar::storage {

GhostTable::Memory::Memory(size_t max_ghosts)
    : max_ghosts_(max_ghosts), index_(max_ghosts, Hash{{&nodes_}}, Equal{{&nodes_}}) {
  nodes_.reserve(max_ghosts);  // address space only: pages come with the ghosts
}

void GhostTable::Memory::Remember(const Key& key, const Ghost& ghost) {
  if (max_ghosts_ == 0) return;
  Forget(key);
  const Place place = TakeNode();
  nodes_[place] = {.key = key, .ghost = ghost, .older = youngest_};
  (youngest_ == kNowhere ? oldest_ : nodes_[youngest_].younger) = place;
  youngest_ = place;
  index_.insert(place);
}

const Ghost* GhostTable::Memory::Find(const Key& key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &nodes_[*found].ghost;
}

void GhostTable::Memory::Forget(const Key& key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return;
  const Place place = *found;
  index_.erase(found);
  Unlink(place);
  nodes_[place].older = free_;
  free_ = place;
}

GhostTable::Place GhostTable::Memory::TakeNode() {
  if (index_.size() == max_ghosts_) Forget(Key(nodes_[oldest_].key));
  if (free_ == kNowhere) {
    nodes_.emplace_back();
    return static_cast<Place>(nodes_.size() - 1);
  }
  const Place place = free_;
  free_ = nodes_[place].older;
  return place;
}

void GhostTable::Memory::Unlink(Place place) {
  const Node& node = nodes_[place];
  (node.older == kNowhere ? oldest_ : nodes_[node.older].younger) = node.younger;
  (node.younger == kNowhere ? youngest_ : nodes_[node.younger].older) = node.older;
}

void GhostTable::Remember(TenantId tenant, const Key& key, const Ghost& ghost) {
  memories_.try_emplace(tenant, max_ghosts_).first->second.Remember(key, ghost);
}

const Ghost* GhostTable::Find(TenantId tenant, const Key& key) const {
  const auto memory = memories_.find(tenant);
  return memory == memories_.end() ? nullptr : memory->second.Find(key);
}

void GhostTable::Forget(TenantId tenant, const Key& key) {
  const auto memory = memories_.find(tenant);
  if (memory != memories_.end()) memory->second.Forget(key);
}

size_t GhostTable::size(TenantId tenant) const {
  const auto memory = memories_.find(tenant);
  return memory == memories_.end() ? 0 : memory->second.size();
}

}  // namespace ashlar::storage
