// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/placement.h"

#include <algorithm>
#include <utility>

#include "storage/objects/object_bytes.h"

namespace ashlar::storage {

using State = Copy::State;

namespace {

// Returns whether other copies are read from it or engines may read it.
bool Used(const Entry& entry, size_t level) {
  return entry.copies[level].readers > 0 || entry.copies[level].users > 0;
}

}  // namespace

Placement::Placement(const Tiers& tiers, Executor& copying, AdmissionPolicy& admission, PromotionCosts& promotion,
                     const ReuseModels* prices, const Clock& clock, Observer& observer, Events events)
    : beside_(tiers.beside),
      common_(tiers.common),
      memory_(tiers.memory.size()),
      disk_(tiers.ssd),
      disk_level_(tiers.ssd == nullptr ? SIZE_MAX : tiers.memory.size()),
      remote_(tiers.remote),
      remote_level_(tiers.memory.size() + (tiers.ssd == nullptr ? 0 : 1)),
      copier_(copying, tiers.ssd, tiers.remote),
      admission_(admission),
      promotion_(promotion),
      clock_(clock),
      observer_(observer),
      events_(std::move(events)) {
  std::vector<Tier*> all = tiers.memory;
  if (disk_ != nullptr) all.push_back(disk_);
  for (size_t i = 0; i < all.size(); ++i) {
    if (prices != nullptr) {
      policies_.push_back(std::make_unique<PricePolicy>(*prices));
    } else {
      policies_.push_back(std::make_unique<LruPolicy>());
    }
    levels_.push_back(std::make_unique<Level>(*all[i], *policies_.back(), observer));
  }
}

Placement::~Placement() = default;

bool Placement::Reserve(Entry& entry, size_t level, uint64_t extents) {
  if (!MakeRoom(entry, level, extents)) return false;
  entry.copies[level].state = State::kWhole;  // no other copy fills it
  return true;
}

void Placement::Written(Entry& entry, size_t level) {
  const uint64_t extents = entry.header.Extents();
  Copy& copy = entry.copies[level];
  if (Slot spare = copy.slot.CutBehind(extents); !spare.runs.empty())
    levels_[level]->Free(entry.pool, std::move(spare));
  copy.loaded = extents;
  copy.source = static_cast<uint8_t>(level);                                   // not filled from a lower level
  if (disk_ != nullptr) admission_.Seen(entry.pool.tenant, entry.header.key);  // no other call records this use
  BecameWhole(entry, level);
}

void Placement::Adopt(Entry& entry, Slot slot) {
  const uint64_t extents = slot.Extents();
  Copy& copy = entry.copies[disk_level_];
  copy.slot = std::move(slot);
  copy.state = State::kWhole;
  copy.loaded = extents;
  levels_[disk_level_]->Adopt(entry.pool, extents);
  Refresh(entry);
}

TierKind Placement::Nearest(const Entry& entry) const {
  for (size_t i = 0; i <= levels(); ++i) {
    if (entry.copies[i].readable()) return kind(i);
  }
  return TierKind::kNone;
}

void Placement::WhenLoaded(Entry& entry, size_t level, uint64_t extents, std::function<void()> call) {
  if (entry.copies[level].loaded >= extents || Lost(entry, level) != MissReason::kNone) return call();
  Hasten(entry, clock_.Now());
  entry.waiters.push_back({level, extents, std::move(call)});
}

void Placement::Hasten(Entry& entry, Nanos needed_at) {
  entry.needed_at = std::min(entry.needed_at, needed_at);
  for (size_t i = 0; i < levels(); ++i) {
    Copy& copy = entry.copies[i];
    const bool wanted = copy.source > i || (i < memory_ && Used(entry, i));  // or it is only copied down
    if (copy.state == State::kCopying && copy.tier_copy != nullptr && wanted) {
      copier_.Hasten(copy.tier_copy, needed_at);
    }
  }
}

void Placement::CallWaiters(Entry& entry) {
  std::vector<Entry::Waiter> ready;
  const auto is_ready = [&](const Entry::Waiter& waiter) {
    return entry.copies[waiter.level].loaded >= waiter.extents || Lost(entry, waiter.level) != MissReason::kNone;
  };
  const auto rest = std::stable_partition(entry.waiters.begin(), entry.waiters.end(), std::not_fn(is_ready));
  std::move(rest, entry.waiters.end(), std::back_inserter(ready));
  entry.waiters.erase(rest, entry.waiters.end());
  for (const Entry::Waiter& waiter : ready) waiter.call();
}

void Placement::Touched(Entry& entry) {
  for (size_t i = 0; i < levels(); ++i) {
    if (entry.copies[i].rank.tracked()) levels_[i]->Touch(entry.copies[i].rank);
  }
}

void Placement::Touch(Entry& entry) {
  Touched(entry);
  if (disk_ != nullptr) admission_.Seen(entry.pool.tenant, entry.header.key);
  QueueBehind(entry);
}

void Placement::Changed(Entry& entry) {
  if (entry.gone != MissReason::kNone) return Vacate(entry);
  ++entry.holds;
  // An unwanted copy in flight blocks others.
  const bool unused = entry.references == 0;
  bool given_up = false;
  for (size_t i = 0; i < beside_; ++i) given_up |= unused && entry.copies[i].state == State::kCopying;
  for (size_t i = 0; i < levels(); ++i) {
    const bool unwanted = unused ? given_up : i < beside_ && entry.copies[i].users == 0;
    if (unwanted && CopiedFromBelow(entry, i)) CancelCopy(entry, i);
  }
  --entry.holds;
  if (entry.gone != MissReason::kNone) return Vacate(entry);
  if (!DropIfRemote(entry)) Refresh(entry);
}

void Placement::Discard(Entry& entry) {
  ++entry.holds;
  for (size_t i = 0; i < levels(); ++i) {
    if (entry.copies[i].state == State::kCopying) CancelCopy(entry, i);
  }
  CallWaiters(entry);
  --entry.holds;
  Vacate(entry);
}

void Placement::Vacate(Entry& entry) {
  Refresh(entry);
  if (entry.remote != 0 && RemoteOf(entry).readers == 0) RemoveRemote(entry);
  bool vacant = entry.references == 0 && entry.holds == 0 && entry.remote == 0;
  for (size_t i = 0; i < levels(); ++i) {
    const Copy& copy = entry.copies[i];
    const bool still = copy.state == State::kWhole || copy.state == State::kBroken;
    if (still && !Used(entry, i)) Remove(entry, i);
    vacant &= copy.state == State::kNone;
  }
  if (vacant) events_.vacated(entry);
}

void Placement::Refresh(Entry& entry) {
  const bool here = entry.ready && entry.gone == MissReason::kNone;
  const bool held = entry.pinned || entry.references > 0;
  const bool last = held && std::ranges::count_if(entry.copies, &Copy::whole) == 1;
  for (size_t i = 0; i < levels(); ++i) {
    Copy& copy = entry.copies[i];
    const bool ranked = here && copy.whole();
    if (ranked && !copy.rank.tracked()) levels_[i]->Track(entry, copy.rank);
    levels_[i]->SetIdle(entry.pool, copy.rank, ranked && !last && !Used(entry, i));
    if (!ranked && copy.rank.tracked()) levels_[i]->Erase(copy.rank);
  }
  Reside(entry, here);
  const bool elsewhere = entry.remote != 0 || entry.hand == Entry::Hand::kTaken;
  const bool unsaved = here && !elsewhere && (disk_ == nullptr || !entry.copies[disk_level_].whole());
  if (unsaved == entry.unsaved) return;
  entry.unsaved = unsaved;
  unsaved_ += unsaved ? 1 : -1;
  unsaved_bytes_ += unsaved ? entry.header.bytes : -entry.header.bytes;
}

bool Placement::MakeRoom(Entry& entry, size_t level, uint64_t extents) {
  // Ending a victim ends its bundle, which may include other victims and this entry.
  ++entry.holds;
  std::optional<Slot> slot = levels_[level]->MakeRoom(entry.pool, extents, [this, level](ObjectId id) {
    Entry* victim = events_.find(id);
    if (victim != nullptr && victim->copies[level].rank.idle) GiveUp(*victim, level);
  });
  --entry.holds;
  if (entry.gone != MissReason::kNone) {
    if (slot) levels_[level]->Free(entry.pool, *std::move(slot));
    Vacate(entry);
    return false;
  }
  if (!slot) return false;
  Copy& copy = entry.copies[level];
  copy.slot = *std::move(slot);
  copy.state = State::kCopying;
  copy.loaded = 0;
  return true;
}

void Placement::GiveUp(Entry& entry, size_t level) {
  // A disk may be copying it down. For a moment it may read extents that already hold other objects' bytes; such a copy
  // is never committed.
  if (!IsDisk(level) && disk_ != nullptr && CopiedFrom(entry, disk_level_, level)) CancelCopy(entry, disk_level_);
  Remove(entry, level);
  const bool elsewhere = std::ranges::any_of(entry.copies, &Copy::readable);
  if (elsewhere) return Refresh(entry);
  events_.lost(entry, MissReason::kEvicted, levels_[level]->policy(), kind(level));
}

void Placement::Remove(Entry& entry, size_t level) {
  Copy& copy = entry.copies[level];
  const bool committed = IsDisk(level) && copy.whole();
  copy.state = State::kNone;
  copy.loaded = 0;
  Refresh(entry);
  Slot slot = std::exchange(copy.slot, {});
  if ((entry.erased || entry.damaged) && IsDisk(level)) disk_->Shred(slot);
  if (!committed) return levels_[level]->Free(entry.pool, std::move(slot));
  levels_[level]->Freed(entry.pool, slot.Extents());
  disk_->Erase(entry.pool.tenant, entry.header.key, std::move(slot), [this] { Pump(); });
}

TierCopier::End Placement::EndOf(const Entry& entry, size_t level) const {
  const Slot* const slot = &entry.copies[level].slot;
  if (level == remote_level_) return {.slot = slot, .remote = entry.remote};
  return {.memory = IsDisk(level) ? nullptr : &levels_[level]->tier(), .slot = slot};
}

void Placement::StartCopy(Entry& entry, size_t from, size_t to, Nanos needed_at) {
  Copy& copy = entry.copies[to];
  copy.source = static_cast<uint8_t>(from);
  ++tier_copies_;
  if (needed_at == TierCopier::kWhenIdle) ++behind_[entry.pool.tenant].tier_copies;
  // A disk may read a copy that is being given up; another memory copy may not.
  if (!IsDisk(to)) ++entry.copies[from].readers;
  if (IsDisk(from)) from_disk_.insert(entry.id);
  copy.tier_copy =
      copier_.Start(EndOf(entry, from), EndOf(entry, to), entry.header.Extents(), entry.copies[from].loaded, needed_at,
                    {.progress = [this, &entry, to](uint64_t loaded) { CopyProgress(entry, to, loaded); },
                     .done =
                         [this, &entry, to](const absl::Status& status) {
                           CopyDone(entry, to, status);
                           Pump();
                         }});
  Refresh(entry);
}

bool Placement::CopiedFrom(const Entry& entry, size_t level, size_t source) {
  return entry.copies[level].state == State::kCopying && entry.copies[level].source == source;
}

bool Placement::CopiedFromBelow(const Entry& entry, size_t level) {
  return entry.copies[level].state == State::kCopying && entry.copies[level].source > level;
}

void Placement::CancelCopy(Entry& entry, size_t level) {
  if (entry.copies[level].tier_copy == nullptr) return Break(entry, level);  // reserved, but never filled
  entry.copies[level].state = State::kDraining;
  entry.copies[level].loaded = 0;
  if (copier_.Cancel(*entry.copies[level].tier_copy)) CopyDone(entry, level, absl::CancelledError("copy: cancelled"));
}

void Placement::CopyProgress(Entry& entry, size_t level, uint64_t loaded) {
  Copy& copy = entry.copies[level];
  if (copy.state != State::kCopying || IsDisk(level)) return;
  copy.loaded = loaded;
  for (size_t i = 0; i < level; ++i) {
    if (CopiedFrom(entry, i, level)) copier_.Offer(*entry.copies[i].tier_copy, loaded);
  }
  if (level < memory_) CallWaiters(entry);
}

void Placement::CopyDone(Entry& entry, size_t level, const absl::Status& status) {
  Copy& copy = entry.copies[level];
  copy.tier_copy.reset();
  --tier_copies_;
  if (copy.source < level) --behind_[entry.pool.tenant].tier_copies;
  if (IsDisk(copy.source)) from_disk_.erase(from_disk_.find(entry.id));
  if (!IsDisk(level)) DoneReading(entry, copy.source);
  if (copy.state == State::kDraining && copy.users > 0 && entry.gone == MissReason::kNone) {
    copy.state = State::kCopying;  // requested again meanwhile
    if (Fetch(entry, level) || entry.gone != MissReason::kNone) return;
    Break(entry, level);
    events_.lost(entry, MissReason::kTierError, PolicyKind::kNone, kind(level));
  } else if (copy.state == State::kDraining || !status.ok()) {
    CopyFailed(entry, level, status);
  } else if (IsDisk(level)) {
    copy.state = State::kCommitting;
    copy.loaded = entry.header.Extents();
    ++tier_copies_;
    ++behind_[entry.pool.tenant].tier_copies;
    disk_->Commit(entry.pool.tenant, entry.pool.kind, entry.header, copy.slot,
                  [this, &entry, level](const absl::Status& committed) { Committed(entry, level, committed); });
  } else {
    BecameWhole(entry, level);
  }
}

void Placement::DoneReading(Entry& entry, size_t level) {
  Copy& source = entry.copies[level];
  --source.readers;
  if (level == remote_level_) return;
  if (source.state == State::kBroken && !Used(entry, level)) Remove(entry, level);
}

void Placement::Break(Entry& entry, size_t level) {
  entry.copies[level].state = State::kBroken;
  entry.copies[level].loaded = 0;
  if (!Used(entry, level)) Remove(entry, level);
}

void Placement::CopyFailed(Entry& entry, size_t level, const absl::Status& status) {
  const bool wanted = entry.copies[level].state == State::kCopying;
  const size_t source = entry.copies[level].source;
  Break(entry, level);
  if (wanted) {
    if (!absl::IsAborted(status)) {
      observer_.TierError(entry.pool.tenant, IsDisk(level) ? kind(level) : kind(source), status);
    }
    // An unreadable source is not a copy; the copy from it ends too.
    const MissReason of_node = absl::IsAborted(status) ? MissReason::kSlowerThanRecompute : MissReason::kPeerFailed;
    const MissReason why = source == remote_level_ ? of_node : MissReason::kTierError;
    if (source > level) return events_.lost(entry, why, PolicyKind::kNone, kind(source));
  }
  // It can no longer arrive, and a caller waits for it.
  const bool awaited = level < memory_ && entry.copies[level].users > 0 && entry.gone == MissReason::kNone;
  if (awaited) return events_.lost(entry, MissReason::kTierError, PolicyKind::kNone, kind(level));
  if (entry.gone != MissReason::kNone) return Vacate(entry);
  if (DropIfRemote(entry)) return;
  LeaveRemote(entry);  // another copy may have become whole while this one was being read
  Refresh(entry);
  if (flushing_ && !wanted) QueueBehind(entry);  // it was draining when the others were queued
}

void Placement::Committed(Entry& entry, size_t level, const absl::Status& status) {
  --tier_copies_;
  --behind_[entry.pool.tenant].tier_copies;
  Copy& copy = entry.copies[level];
  if (status.ok()) {
    copy.loaded = entry.header.Extents();
    BecameWhole(entry, level);
  } else {
    observer_.TierError(entry.pool.tenant, kind(level), status);
    Break(entry, level);
    const bool elsewhere = std::ranges::any_of(entry.copies, &Copy::whole);
    if (entry.gone != MissReason::kNone) {
      Vacate(entry);
    } else if (!elsewhere) {
      events_.lost(entry, MissReason::kTierError, PolicyKind::kNone, kind(level));
    }
  }
  Pump();
}

void Placement::BecameWhole(Entry& entry, size_t level) {
  Copy& copy = entry.copies[level];
  const bool promoted = entry.ready && level < copy.source;
  copy.state = State::kWhole;
  copy.loaded = entry.header.Extents();
  if (entry.gone != MissReason::kNone) return Vacate(entry);
  Refresh(entry);
  LeaveRemote(entry);
  if (promoted && level < beside_ && !std::exchange(entry.taken, false)) Promoted(entry);
  if (copy.source != level) observer_.Copied(entry.pool.tenant, kind(copy.source), kind(level), entry.header.bytes);
  QueueBehind(entry);
  if (level < memory_) CallWaiters(entry);
}

void Placement::Tick() {
  if (disk_ != nullptr) disk_->Tick(clock_.Now());
  EndWaits();
  Pump();
}

void Placement::Pump() {
  for (auto& [tenant, behind] : behind_) PumpBehind(behind);
  copier_.Pump();
}

}  // namespace ashlar::storage
