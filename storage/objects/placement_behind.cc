// SPDX-License-Identifier: Apache-2.0
// Copies objects to lower tiers ahead of need, and to the disk in a drain.
#include <algorithm>
#include <utility>

#include "storage/objects/placement.h"

namespace ashlar::storage {

using State = Copy::State;

void Placement::QueueBehind(Entry& entry) {
  std::deque<ObjectId>& queue = behind_[entry.pool.tenant].queue;
  const bool full = queue.size() >= kMaxQueuedBehind && !flushing_;
  if (entry.behind || !entry.ready || full || !WantsBehind(entry)) return;
  entry.behind = true;
  queue.push_back(entry.id);
}

bool Placement::WantsBehind(const Entry& entry) {
  if (flushing_) return disk_ != nullptr && entry.unsaved && !Saving(entry) && entry.hand != Entry::Hand::kOffered;
  for (size_t i = 0; Below(i) < levels(); ++i) {
    const size_t below = Below(i);
    if (entry.copies[i].whole() && entry.copies[below].state == State::kNone && Admits(entry, below)) return true;
  }
  return false;
}

Placement::Unsaved Placement::unsaved() const {
  const auto writes = [](const auto& tenant) { return !tenant.second.queue.empty() || tenant.second.tier_copies > 0; };
  const bool stalled = disk_ != nullptr && disk_->stalled();
  return {unsaved_, unsaved_bytes_, !stalled && std::ranges::any_of(behind_, writes)};
}

PoolShares Placement::pools() const {
  PoolShares shares;
  for (const auto& level : levels_) level->AddTo(shares);
  return shares;
}

bool Placement::Saving(const Entry& entry) const {
  return disk_ != nullptr && entry.copies[disk_level_].state != State::kNone;
}

void Placement::HandChanged(Entry& entry) {
  Refresh(entry);
  QueueBehind(entry);
  Pump();
}

void Placement::Flush(const std::vector<ObjectId>& order) {
  flushing_ = true;
  for (auto& [tenant, behind] : behind_) {
    for (const ObjectId waiting : std::exchange(behind.queue, {})) {
      if (Entry* entry = events_.find(waiting); entry != nullptr) entry->behind = false;
    }
  }
  for (const ObjectId next : order) {
    Entry& entry = *events_.find(next);
    entry.behind = WantsBehind(entry);
    if (entry.behind) behind_[entry.pool.tenant].queue.push_back(next);
  }
  if (disk_ != nullptr) disk_->Probe([this] { Pump(); });
  Pump();
}

bool Placement::WriteOut(Entry& entry) {
  const auto from = std::ranges::find_if(entry.copies, &Copy::whole);
  if (!WantsBehind(entry) || from == entry.copies.end() || disk_->degraded()) return true;
  const uint64_t extents = entry.header.Extents();
  if (levels_[disk_level_]->Full(entry.pool, extents) || !MakeRoom(entry, disk_level_, extents)) return false;
  StartCopy(entry, static_cast<size_t>(from - entry.copies.begin()), disk_level_, TierCopier::kWhenIdle);
  return true;
}

bool Placement::Admits(const Entry& entry, size_t level) {
  if (!IsDisk(level)) return true;
  if (disk_->degraded() || entry.deferred) return false;
  std::optional<Key> victim;
  if (levels_[level]->Full(entry.pool, entry.header.Extents())) {
    const Entry* next = levels_[level]->NextVictim(entry.pool);
    if (next == nullptr) return false;
    victim = next->header.key;
  }
  return admission_.Admits(entry.pool.tenant, entry.header.key, victim);
}

bool Placement::WriteBehind(Entry& entry) {
  for (size_t i = 0; Below(i) < levels(); ++i) {
    const size_t below = Below(i);
    if (!entry.copies[i].whole() || entry.copies[below].state != State::kNone) continue;
    if (IsDisk(below) && disk_->degraded()) continue;
    const ObjectId id = entry.id;
    ObjectId& admitted = behind_[entry.pool.tenant].admitted;
    if (id != admitted && !Admits(entry, below)) continue;
    if (!MakeRoom(entry, below, entry.header.Extents())) {
      // A disk may have room soon. A full memory tier holds what others copy there: evicting that would make them copy
      // it again.
      if (!IsDisk(below)) return true;
      admitted = id;
      return false;
    }
    StartCopy(entry, i, below, TierCopier::kWhenIdle);
  }
  return true;
}

void Placement::PumpBehind(Behind& behind) {
  // A disk under probe may accept writes soon.
  const bool waits = flushing_ && disk_ != nullptr && disk_->probing() && !disk_->stalled();
  while (!waits && !behind.queue.empty() && behind.tier_copies < kMaxBehind) {
    const ObjectId next = behind.queue.front();
    behind.queue.pop_front();
    Entry* entry = events_.find(next);
    if (entry == nullptr || entry->gone != MissReason::kNone) continue;
    entry->behind = false;
    const TenantPool pool = entry->pool;
    if ((flushing_ ? WriteOut(*entry) : WriteBehind(*entry)) || !levels_.back()->Coming(pool)) continue;
    entry = events_.find(next);
    if (entry == nullptr || entry->gone != MissReason::kNone) continue;
    entry->behind = true;  // its extents become free soon
    behind.queue.push_front(next);
    return;
  }
}

}  // namespace ashlar::storage
