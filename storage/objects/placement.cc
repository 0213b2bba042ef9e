// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/placement.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "storage/objects/object_bytes.h"

namespace ashlar::storage {

Placement::Placement(Levels& levels, Executor& copying, AdmissionPolicy& admission, PromotionCosts& promotion,
                     const Clock& clock, Observer& observer, const ObjectIndex& index, ObjectEvents& objects,
                     CopyTransitionCounts* transition_counts)
    : levels_(levels),
      admission_(admission),
      promotion_(promotion),
      clock_(clock),
      observer_(observer),
      index_(index),
      objects_(objects),
      copies_(levels, scheduler_, index, objects, transition_counts),
      scheduler_(levels, copying, admission, index, *this) {}

bool Placement::Reserve(Entry& entry, size_t level, uint64_t extents) {
  if (!copies_.Allocate(entry, level, extents)) return false;
  copies_.Apply(entry, level, CopyEvent::kReserve);
  return true;
}

void Placement::Written(Entry& entry, size_t level) {
  const uint64_t extents = entry.header.Extents();
  Copy& copy = entry.copies[level];
  if (Slot spare = copy.slot.SplitAfter(extents); !spare.runs.empty()) {
    levels_[level].Free(entry.pool, std::move(spare));
  }
  copy.source = static_cast<uint8_t>(level);
  if (levels_.ssd() != nullptr)
    admission_.Seen(entry.pool.tenant, entry.header.key);  // only the disk has an admission policy
  BecameWhole(entry, level, std::nullopt);
}

void Placement::WhenLoaded(Entry& entry, size_t level, uint64_t extents, std::function<void()> call) {
  if (entry.copies[level].loaded >= extents || levels_.Lost(entry, level) != MissReason::kNone) return call();
  scheduler_.Hasten(entry, clock_.Now());
  entry.waiters.push_back({level, extents, std::move(call)});
}

void Placement::CallWaiters(Entry& entry) {
  std::vector<Entry::Waiter> ready;
  const auto waits = [&](const Entry::Waiter& waiter) {
    return entry.copies[waiter.level].loaded < waiter.extents && levels_.Lost(entry, waiter.level) == MissReason::kNone;
  };
  const auto first_ready = std::stable_partition(entry.waiters.begin(), entry.waiters.end(), waits);
  std::move(first_ready, entry.waiters.end(), std::back_inserter(ready));
  entry.waiters.erase(first_ready, entry.waiters.end());
  for (const Entry::Waiter& waiter : ready) waiter.call();
}

void Placement::Defer(Entry& entry) const {
  if (entry.ready || !defers()) return;
  const std::vector<Entry*> shards = index_.keys().All(entry.pool.tenant, entry.header.key);
  entry.deferred = std::ranges::all_of(shards, [&](const Entry* other) { return other == &entry || other->deferred; });
}

void Placement::Touch(Entry& entry) {
  levels_.Touch(entry);
  entry.judged = entry.admitted;
  if (levels_.ssd() != nullptr) admission_.Seen(entry.pool.tenant, entry.header.key);
  scheduler_.QueueDown(entry);
}

void Placement::Changed(Entry& entry) {
  if (entry.gone != MissReason::kNone) return copies_.Vacate(entry);
  ++entry.holds;
  // A promotion that no reference waits for holds space that others need.
  const bool unused = entry.references == 0;
  bool cancels = false;
  for (size_t i = 0; i < levels_.sibling_count(); ++i) {
    cancels |= unused && entry.copies[i].phase() == CopyPhase::kCopying;
  }
  for (size_t i = 0; i < levels_.size(); ++i) {
    const bool unwanted = unused ? cancels : i < levels_.sibling_count() && entry.copies[i].state.users() == 0;
    if (unwanted && Levels::IsCopiedFromBelow(entry, i)) copies_.Cancel(entry, i);
  }
  --entry.holds;
  if (entry.gone != MissReason::kNone) return copies_.Vacate(entry);
  // Delete the waiters of cancelled landings and compositions.
  std::erase_if(entry.waiters,
                [&](const Entry::Waiter& waiter) { return entry.copies[waiter.level].state.users() == 0; });
  copies_.ReleaseBroken(entry);
  if (!copies_.DropIfRemote(entry)) copies_.Refresh(entry);
}

void Placement::TransferChanged(Entry& entry) {
  copies_.Refresh(entry);
  scheduler_.QueueDown(entry);
  scheduler_.Pump();
}

void Placement::Discard(Entry& entry) {
  ++entry.holds;
  for (size_t i = 0; i < levels_.size(); ++i) {
    if (entry.copies[i].phase() == CopyPhase::kCopying) copies_.Cancel(entry, i);
  }
  CallWaiters(entry);
  --entry.holds;
  copies_.Vacate(entry);
}

void Placement::Tick() {
  if (SsdTier* const ssd = levels_.ssd(); ssd != nullptr) {
    ssd->health().Tick(clock_.Now());
    const std::vector<ObjectId> from_disk = ssd->health().stalled() ? scheduler_.from_disk() : std::vector<ObjectId>();
    for (const ObjectId id : from_disk) {  // a waiter may end entries
      if (Entry* const entry = index_.EntryOf(id)) CallWaiters(*entry);
    }
  }
  scheduler_.Pump();
}

MissReason Placement::Promote(Entry& entry, size_t level, const Recompute& recompute, Nanos needed_at) {
  const Nanos now = clock_.Now();
  needed_at = std::max(now, needed_at);
  if (levels_.IsStalled(entry, level)) return MissReason::kTierError;
  const Copy& copy = entry.copies[level];
  // The copy was cancelled while pieces of it are still being written. It is filled again afterwards.
  const bool drains = copy.phase() == CopyPhase::kDraining, awaited = drains && copy.state.users() > 1;
  if (copy.whole() || copy.phase() == CopyPhase::kCopying || awaited) {
    if (!promotion_[entry.pool.tenant].Pays(levels_.kind(level), entry.header.bytes, recompute.time)) {
      return MissReason::kSlowerThanRecompute;
    }
    const bool from_peer = copy.phase() == CopyPhase::kCopying && copy.source == levels_.remote() && entry.remote != 0;
    if (from_peer) levels_.source()->SetRecompute(entry.remote, recompute.of_remote);
    scheduler_.Hasten(entry, needed_at);
    return MissReason::kNone;
  }
  if (copy.phase() == CopyPhase::kBroken) return MissReason::kBudgetRefused;  // another copy still reads from its space
  size_t from = levels_.SourceBelow(entry, level);
  if (from == Levels::kNowhere) from = levels_.OnAnotherGpu(entry, level);
  // No level has readable bytes: the only other copy is draining.
  if (from == Levels::kNowhere) return MissReason::kBudgetRefused;
  const bool stalled = levels_.IsDisk(from) ? levels_.ssd()->health().stalled() : levels_.IsStalled(entry, from);
  if (stalled) return MissReason::kTierError;
  PromotionCost& cost = promotion_[entry.pool.tenant];
  const bool pays = from == levels_.remote() && entry.remote_cost > 0
                        ? cost.PaysWith(entry.remote_cost, entry.header.bytes, recompute.of_remote, needed_at - now)
                        : cost.Pays(levels_.kind(from), entry.header.bytes, recompute.time, needed_at - now);
  if (!pays) return MissReason::kSlowerThanRecompute;
  if (from == levels_.remote()) levels_.source()->SetRecompute(entry.remote, recompute.of_remote);
  entry.promoted_at = now;
  entry.promoted_from = from;
  entry.needed_at = needed_at;
  if (drains) return MissReason::kNone;
  return Fetch(entry, level) ? MissReason::kNone : MissReason::kBudgetRefused;
}

// From one GPU to another, an object is copied through the tier below both.
bool Placement::Fetch(Entry& entry, size_t level) {
  if (const size_t below = levels_.SourceBelow(entry, level); below != Levels::kNowhere) {
    return FetchFrom(entry, level, below);
  }
  const size_t gpu = levels_.OnAnotherGpu(entry, level), shared = levels_.below_siblings();
  if (gpu == Levels::kNowhere || shared >= levels_.memory()) return false;
  if (entry.copies[shared].phase() != CopyPhase::kNone || !FetchFrom(entry, shared, gpu)) return false;
  const Copy& copy = entry.copies[level];
  return level == shared || copy.whole() || copy.tier_copy != nullptr || FetchFrom(entry, level, shared);
}

bool Placement::FetchFrom(Entry& entry, size_t level, size_t from) {
  // Allocating may evict another shard of the entry's bundle, which ends the entry.
  ++entry.holds;
  copies_.Apply(entry, from, CopyEvent::kAddReader);  // the source is not evicted to make space
  copies_.Refresh(entry);
  Copy& copy = entry.copies[level];
  const bool allocated = copy.phase() == CopyPhase::kCopying || copies_.Allocate(entry, level, entry.header.Extents());
  const auto wanted = [&] {
    return allocated && entry.gone == MissReason::kNone && copy.phase() == CopyPhase::kCopying;
  };
  copy.source = static_cast<uint8_t>(from);
  // A tier in between also gets a copy, if it has space and the bytes pass through it.
  const bool straight = from == levels_.remote() && scheduler_.ReadsStraightTo(level);
  std::vector<size_t> path = {from};
  for (size_t between = from - 1; !straight && from > level && wanted() && between >= levels_.Below(level); --between) {
    const bool vacant = entry.copies[between].phase() == CopyPhase::kNone && !levels_.IsDisk(between);
    if (!vacant || !copies_.Allocate(entry, between, entry.header.Extents())) continue;
    entry.copies[between].source = static_cast<uint8_t>(from);
    path.push_back(between);
  }
  const bool starts = wanted();
  for (const size_t filled : path) {
    const bool allocated_here = filled < from && entry.copies[filled].phase() == CopyPhase::kCopying;
    if (!starts && allocated_here) copies_.Break(entry, filled, CopyEvent::kAbandon);
  }
  copies_.RemoveReader(entry, from);
  --entry.holds;
  if (!starts) {
    copies_.RefreshOrVacate(entry);
    return false;
  }
  copies_.Refresh(entry);
  // Engines read the header in place, before the rest has arrived.
  WriteStart(levels_.TierAt(level), copy.slot, EncodeHeader(entry.header));
  path.push_back(level);
  // A copy down starts as usual, and is then expedited.
  const Nanos needed_at = from < level ? TierCopier::kWhenIdle : entry.needed_at;
  for (size_t i = 1; i < path.size(); ++i) StartCopy(entry, path[i - 1], path[i], needed_at);
  scheduler_.Hasten(entry, entry.needed_at);  // also expedites copies of this object that were already in progress
  scheduler_.PumpCopies();
  return true;
}

void Placement::StartCopy(Entry& entry, size_t from, size_t to, Nanos needed_at) {
  // The disk may read an evicted copy meanwhile, because such a copy is never committed.
  if (!levels_.IsDisk(to)) copies_.Apply(entry, from, CopyEvent::kAddReader);
  scheduler_.Start(entry, from, to, needed_at);
  copies_.Refresh(entry);
}

bool Placement::CopyDown(Entry& entry, size_t from, size_t to) {
  if (!copies_.Allocate(entry, to, entry.header.Extents())) return false;
  StartCopy(entry, from, to, TierCopier::kWhenIdle);
  return true;
}

void Placement::Loaded(Entry& entry, size_t level, uint64_t loaded) {
  Copy& copy = entry.copies[level];
  if (copy.phase() != CopyPhase::kCopying || levels_.IsDisk(level)) return;
  copy.loaded = loaded;
  for (size_t i = 0; i < level; ++i) {
    if (Levels::IsCopiedFrom(entry, i, level)) scheduler_.Offer(entry, i, loaded);
  }
  if (level < levels_.memory()) CallWaiters(entry);
}

void Placement::Ended(Entry& entry, size_t level, const absl::Status& status) {
  Copy& copy = entry.copies[level];
  if (copy.phase() == CopyPhase::kCommitting) return Committed(entry, level, status);
  if (!levels_.IsDisk(level)) copies_.RemoveReader(entry, copy.source);
  if (copy.phase() == CopyPhase::kDraining && copy.state.users() > 0 && entry.gone == MissReason::kNone) {
    copies_.Apply(entry, level, CopyEvent::kRefill);
    if (Fetch(entry, level) || entry.gone != MissReason::kNone) return;
    if (copy.phase() == CopyPhase::kCopying) copies_.Break(entry, level, CopyEvent::kAbandon);
    objects_.Lost(entry, MissReason::kTierError, PolicyKind::kNone, levels_.kind(level));
  } else if (copy.phase() == CopyPhase::kDraining || !status.ok()) {
    Failed(entry, level, status);
  } else if (levels_.IsDisk(level)) {
    copies_.Apply(entry, level, CopyEvent::kWrite);
    copy.loaded = entry.header.Extents();
    scheduler_.Commit(entry);
  } else {
    BecameWhole(entry, level, CopyEvent::kLoad);
  }
}

void Placement::Failed(Entry& entry, size_t level, const absl::Status& status) {
  const bool wanted = entry.copies[level].phase() == CopyPhase::kCopying;
  if (levels_.IsDisk(level)) entry.admitted = false;
  const size_t source = entry.copies[level].source;
  copies_.Break(entry, level, wanted ? CopyEvent::kFail : CopyEvent::kDrain);
  if (wanted) {
    if (!absl::IsAborted(status)) {
      observer_.TierError(entry.pool.tenant, levels_.kind(levels_.IsDisk(level) ? level : source), status);
    }
    // An unreadable source counts as lost, and so does the copy filled from it.
    const MissReason of_node = absl::IsAborted(status) ? MissReason::kSlowerThanRecompute : MissReason::kPeerFailed;
    const MissReason reason = source == levels_.remote() ? of_node : MissReason::kTierError;
    if (source > level) return objects_.Lost(entry, reason, PolicyKind::kNone, levels_.kind(source));
  }
  // The copy will not arrive, but a reference waits for it.
  const bool awaited = level < levels_.memory() && entry.copies[level].state.users() > 0;
  if (awaited && entry.gone == MissReason::kNone) {
    return objects_.Lost(entry, MissReason::kTierError, PolicyKind::kNone, levels_.kind(level));
  }
  if (entry.gone != MissReason::kNone) return copies_.Vacate(entry);
  if (copies_.DropIfRemote(entry)) return;
  copies_.ReleaseRemote(entry);  // another copy may have become whole while this one was still reading
  copies_.Refresh(entry);
  if (scheduler_.flushing() && !wanted)
    scheduler_.QueueDown(entry);  // it was already draining when everything else was queued
}

void Placement::Committed(Entry& entry, size_t level, const absl::Status& status) {
  entry.admitted = false;
  entry.judged &= !status.ok();
  if (status.ok()) return BecameWhole(entry, level, CopyEvent::kCommit);
  observer_.TierError(entry.pool.tenant, levels_.kind(level), status);
  copies_.Break(entry, level, CopyEvent::kFail);
  if (entry.gone != MissReason::kNone) return copies_.Vacate(entry);
  const bool elsewhere = std::ranges::any_of(entry.copies, &Copy::whole);
  if (!elsewhere) objects_.Lost(entry, MissReason::kTierError, PolicyKind::kNone, levels_.kind(level));
}

void Placement::BecameWhole(Entry& entry, size_t level, std::optional<CopyEvent> event) {
  Copy& copy = entry.copies[level];
  const bool promoted = entry.ready && level < copy.source;
  if (event) copies_.Apply(entry, level, *event);
  copy.loaded = entry.header.Extents();
  if (entry.gone != MissReason::kNone) return copies_.Vacate(entry);
  copies_.Refresh(entry);
  copies_.ReleaseRemote(entry);
  if (promoted && level < levels_.sibling_count() && !std::exchange(entry.adopted, false)) Measure(entry);
  if (copy.source != level) {
    observer_.Copied(entry.pool.tenant, levels_.kind(copy.source), levels_.kind(level), entry.header.bytes);
  }
  scheduler_.QueueDown(entry);
  if (level < levels_.memory()) CallWaiters(entry);
}

// A copy requested ahead of need yields to others, so its duration says nothing about the time of copying.
void Placement::Measure(const Entry& entry) {
  const Nanos now = clock_.Now();
  if (entry.needed_at > entry.promoted_at) {
    observer_.Prefetched(entry.pool.tenant, now <= entry.needed_at);
  } else {
    promotion_[entry.pool.tenant].Promoted(levels_.kind(entry.promoted_from), entry.header.bytes, entry.promoted_at,
                                           now);
  }
}

}  // namespace ashlar::storage
