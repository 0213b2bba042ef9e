// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/copies.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

namespace ashlar::storage {

Copies::Copies(Levels& levels, CopyScheduler& scheduler, const ObjectIndex& index, ObjectEvents& objects,
               CopyTransitionCounts* transition_counts)
    : levels_(levels), scheduler_(scheduler), index_(index), objects_(objects), states_(transition_counts) {}

void Copies::Apply(Entry& entry, size_t level, CopyEvent event) const {
  states_.Apply(entry.copies[level].state, event, entry.gone != MissReason::kNone);
}

bool Copies::Allocate(Entry& entry, size_t level, uint64_t extents) {
  // Evicting a victim ends its bundle: other victims, and possibly this entry.
  ++entry.holds;
  scheduler_.BeforeEviction(entry.pool, level, extents);
  std::optional<Slot> slot = levels_[level].Allocate(entry.pool, extents, [this, level](ObjectId id) {
    Entry* victim = index_.EntryOf(id);
    if (victim != nullptr && victim->copies[level].rank.idle) Evict(*victim, level);
  });
  --entry.holds;
  if (entry.gone != MissReason::kNone) {
    if (slot) levels_[level].Free(entry.pool, *std::move(slot));
    Vacate(entry);
    return false;
  }
  if (!slot) return false;
  Apply(entry, level, CopyEvent::kAllocate);
  Copy& copy = entry.copies[level];
  copy.slot = *std::move(slot);
  copy.loaded = 0;
  return true;
}

void Copies::AdoptOnDisk(Entry& entry, Slot slot) {
  const size_t level = levels_.disk();
  Copy& copy = entry.copies[level];
  copy.loaded = slot.Extents();
  copy.slot = std::move(slot);
  Apply(entry, level, CopyEvent::kAdopt);
  levels_[level].Adopt(entry.pool, copy.loaded);
  Refresh(entry);
}

void Copies::AdoptRemote(Entry& entry, RemoteCopyId copy, Nanos cost) {
  entry.remote = entry.fetched_from = copy;
  entry.remote_cost = cost;
  Apply(entry, levels_.remote(), CopyEvent::kAdopt);
  entry.copies[levels_.remote()].loaded = entry.header.Extents();
  Refresh(entry);
}

bool Copies::Hold(Entry& entry, size_t level) {
  const bool readable = entry.gone == MissReason::kNone && entry.ready && entry.copies[level].whole();
  if (!readable || levels_.TierAt(level).gpu() != nullptr) return false;
  Apply(entry, level, CopyEvent::kAddReader);
  Refresh(entry);
  return true;
}

void Copies::Unhold(Entry& entry, size_t level) {
  RemoveReader(entry, level);
  RefreshOrVacate(entry);
}

void Copies::Damaged(Entry& entry, size_t level, MissReason why) {
  const Copy& copy = entry.copies[level];
  if (entry.gone != MissReason::kNone || !copy.whole()) return;  // it ended meanwhile
  entry.damaged |= why == MissReason::kChecksumFailed;
  const auto own = std::span(entry.copies).first(levels_.size());
  const bool last = std::ranges::count_if(own, &Copy::whole) == 1;
  if (last || copy.busy()) return objects_.Lost(entry, why, PolicyKind::kNone, levels_.kind(level));
  Evict(entry, level);
}

void Copies::Distrust(Entry& entry) {
  entry.damaged = true;
  if (entry.fetched_from != 0) levels_.source()->Damaged(std::exchange(entry.fetched_from, 0));
}

void Copies::Cancel(Entry& entry, size_t level) {
  Copy& copy = entry.copies[level];
  if (copy.tier_copy == nullptr) return Break(entry, level, CopyEvent::kAbandon);
  Apply(entry, level, CopyEvent::kCancel);
  copy.loaded = 0;
  scheduler_.Cancel(entry, level);
}

void Copies::Break(Entry& entry, size_t level, CopyEvent event) {
  Apply(entry, level, event);
  entry.copies[level].loaded = 0;
  if (!entry.copies[level].busy()) Remove(entry, level);
}

void Copies::RemoveReader(Entry& entry, size_t level) {
  Apply(entry, level, CopyEvent::kRemoveReader);
  const Copy& copy = entry.copies[level];
  if (copy.phase() == CopyPhase::kBroken && !copy.busy()) Remove(entry, level);
}

void Copies::ReleaseBroken(Entry& entry) {
  for (size_t i = 0; i < levels_.size(); ++i) {
    const Copy& copy = entry.copies[i];
    if (copy.phase() == CopyPhase::kBroken && !copy.busy()) Remove(entry, i);
  }
}

void Copies::ReleaseRemote(Entry& entry) {
  if (entry.remote == 0 || entry.copies[levels_.remote()].state.readers() > 0) return;
  const auto own = std::span(entry.copies).first(levels_.size());
  if (std::ranges::any_of(own, &Copy::whole)) Remove(entry, levels_.remote());
}

bool Copies::DropIfRemote(Entry& entry) {
  if (entry.remote == 0 || entry.gone != MissReason::kNone || entry.references > 0 || entry.pinned) return false;
  const auto own = std::span(entry.copies).first(levels_.size());
  const bool vacant = std::ranges::all_of(own, [](const Copy& copy) { return copy.phase() == CopyPhase::kNone; });
  if (!vacant || entry.copies[levels_.remote()].state.readers() > 0) return false;
  objects_.Lost(entry, MissReason::kNeverSeen, PolicyKind::kNone, TierKind::kRemote);
  return true;
}

void Copies::Evict(Entry& entry, size_t level) {
  // The disk may be copying from here. It may continue to read for a moment, from extents that then hold other objects'
  // bytes. Such a copy is never committed.
  const bool read_by_disk =
      levels_.ssd() != nullptr && !levels_.IsDisk(level) && Levels::IsCopiedFrom(entry, levels_.disk(), level);
  if (read_by_disk) Cancel(entry, levels_.disk());
  Remove(entry, level);
  if (std::ranges::any_of(entry.copies, &Copy::readable)) return Refresh(entry);
  objects_.Lost(entry, MissReason::kEvicted, levels_[level].policy(), levels_.kind(level));
}

void Copies::Remove(Entry& entry, size_t level) {
  Copy& copy = entry.copies[level];
  const bool committed = levels_.IsDisk(level) && copy.whole();
  Apply(entry, level, CopyEvent::kRelease);
  copy.loaded = 0;
  if (level == levels_.remote()) {
    const RemoteCopyId remote = std::exchange(entry.remote, 0);
    Refresh(entry);
    return levels_.source()->Release(remote);
  }
  Refresh(entry);
  Slot slot = std::exchange(copy.slot, {});
  if ((entry.erased || entry.damaged) && levels_.IsDisk(level)) levels_.ssd()->Shred(slot);
  if (!committed) return levels_[level].Free(entry.pool, std::move(slot));
  levels_[level].Freed(entry.pool, slot.Extents());
  levels_.ssd()->Erase(entry.pool.tenant, entry.header.key, std::move(slot), [this] { scheduler_.Pump(); });
}

void Copies::Vacate(Entry& entry) {
  Refresh(entry);
  if (entry.remote != 0 && entry.copies[levels_.remote()].state.readers() == 0) Remove(entry, levels_.remote());
  bool vacant = entry.references == 0 && entry.holds == 0 && entry.remote == 0;
  for (size_t i = 0; i < levels_.size(); ++i) {
    const Copy& copy = entry.copies[i];
    const bool rests = copy.whole() || copy.phase() == CopyPhase::kBroken;
    if (rests && !copy.busy()) Remove(entry, i);
    vacant &= copy.phase() == CopyPhase::kNone;
  }
  if (vacant) objects_.Vacated(entry);
}

void Copies::Refresh(Entry& entry) {
  const bool live = entry.ready && entry.gone == MissReason::kNone;
  const bool kept = entry.pinned || entry.references > 0;
  const bool last = kept && std::ranges::count_if(entry.copies, &Copy::whole) == 1;
  for (size_t i = 0; i < levels_.size(); ++i) {
    Copy& copy = entry.copies[i];
    const bool ranked = live && copy.whole();
    levels_[i].SetLower(copy.rank, levels_.Lower(entry, i));
    if (ranked && !copy.rank.tracked()) levels_[i].Track(entry, copy.rank);
    levels_[i].SetIdle(entry.pool, copy.rank, ranked && !last && !copy.busy());
    if (!ranked && copy.rank.tracked()) levels_[i].Erase(copy.rank);
  }
  UpdateResidence(entry, live);
  const bool elsewhere = entry.remote != 0 || entry.transfer == Entry::Transfer::kAccepted;
  const bool memory_only = live && !elsewhere && !entry.saved;
  // Admission is asked again after an object is used.
  entry.copies[levels_.memory() - 1].rank.dirty =
      memory_only && scheduler_.JudgesEvicted() && (!entry.judged || entry.admitted);
  if (memory_only == entry.memory_only) return;
  entry.memory_only = memory_only;
  memory_only_ += memory_only ? 1 : -1;
  memory_only_bytes_ += memory_only ? entry.header.bytes : -entry.header.bytes;
}

void Copies::UpdateResidence(Entry& entry, bool live) {
  const auto own = std::span(entry.copies).first(levels_.size());
  const auto nearest = std::ranges::find_if(own, &Copy::whole);
  const bool resides = live && nearest != own.end();
  const auto level = static_cast<uint8_t>(resides ? nearest - own.begin() : 0);
  const TierKind tier = resides ? levels_.kind(level) : TierKind::kNone;
  const bool saved = live && levels_.ssd() != nullptr && entry.copies[levels_.disk()].whole();
  if (tier == entry.resides && level == entry.resides_at && saved == entry.saved) return;
  entry.resides = tier;
  entry.resides_at = level;
  entry.saved = saved;
  objects_.Resides(entry);
}

}  // namespace ashlar::storage
