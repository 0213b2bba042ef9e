// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/copy_scheduler.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "proto/limits.h"

namespace ashlar::storage {
namespace {

// How far ahead of eviction objects are judged: a part of the memory, and the most extents.
constexpr uint64_t kPartAhead = 8, kMostAhead = 1024;

}  // namespace

CopyScheduler::CopyScheduler(Levels& levels, Executor& copying, AdmissionPolicy& admission, const ObjectIndex& index,
                             Owner& owner)
    : levels_(levels),
      ssd_(levels.ssd()),
      copier_(copying, levels.ssd(), levels.source()),
      admission_(admission),
      index_(index),
      owner_(owner) {}

TierCopier::End CopyScheduler::EndOf(const Entry& entry, size_t level) const {
  const Slot* const slot = &entry.copies[level].slot;
  if (level == levels_.remote()) return {.slot = slot, .remote = entry.remote};
  return {.memory = levels_.IsDisk(level) ? nullptr : &levels_.TierAt(level), .slot = slot};
}

void CopyScheduler::Start(Entry& entry, size_t from, size_t to, Nanos needed_at) {
  Copy& copy = entry.copies[to];
  copy.source = static_cast<uint8_t>(from);
  ++under_way_;
  if (needed_at == TierCopier::kWhenIdle) ++queues_[entry.pool.tenant].under_way;
  if (levels_.IsDisk(from)) from_disk_.insert(entry.id);
  copy.tier_copy =
      copier_.Start(EndOf(entry, from), EndOf(entry, to), entry.header.Extents(), entry.copies[from].loaded, needed_at,
                    {.progress = [this, &entry, to](uint64_t loaded) { owner_.Loaded(entry, to, loaded); },
                     .done =
                         [this, &entry, to](const absl::Status& status) {
                           Done(entry, to, status);
                           Pump();
                         }});
}

void CopyScheduler::Done(Entry& entry, size_t level, const absl::Status& status) {
  Copy& copy = entry.copies[level];
  copy.tier_copy.reset();
  --under_way_;
  if (copy.source < level) --queues_[entry.pool.tenant].under_way;
  if (levels_.IsDisk(copy.source)) from_disk_.erase(from_disk_.find(entry.id));
  owner_.Ended(entry, level, status);
}

void CopyScheduler::Commit(Entry& entry) {
  const size_t level = levels_.disk();
  ++under_way_;
  ++queues_[entry.pool.tenant].under_way;
  ssd_->Commit(entry.pool.tenant, entry.pool.kind, entry.header, entry.copies[level].slot,
               [this, &entry, level](const absl::Status& status) {
                 --under_way_;
                 --queues_[entry.pool.tenant].under_way;
                 owner_.Ended(entry, level, status);
                 Pump();
               });
}

void CopyScheduler::Hasten(Entry& entry, Nanos needed_at) {
  entry.needed_at = std::min(entry.needed_at, needed_at);
  for (size_t i = 0; i < levels_.size(); ++i) {
    const Copy& copy = entry.copies[i];
    const bool wanted = copy.source > i || (i < levels_.memory() && copy.busy());  // or it only moves down
    if (copy.phase() == CopyPhase::kCopying && copy.tier_copy != nullptr && wanted) {
      copier_.Hasten(copy.tier_copy, needed_at);
    }
  }
}

void CopyScheduler::Offer(Entry& entry, size_t level, uint64_t loaded) {
  copier_.Offer(*entry.copies[level].tier_copy, loaded);
}

void CopyScheduler::Cancel(Entry& entry, size_t level) {
  if (copier_.Cancel(*entry.copies[level].tier_copy)) Done(entry, level, absl::CancelledError("tier copy: cancelled"));
}

void CopyScheduler::QueueDown(Entry& entry) {
  std::deque<ObjectId>& queue = queues_[entry.pool.tenant].objects;
  const bool full = queue.size() >= kMaxQueued && !flushing_;
  if (entry.queued_down || !entry.ready || full || !WantsCopyDown(entry)) return;
  entry.queued_down = true;
  queue.push_back(entry.id);
}

void CopyScheduler::BeforeEviction(const TenantPool& pool, size_t level, uint64_t extents) {
  if (!JudgesEvicted() || flushing_ || level + 1 != levels_.disk()) return;
  const uint64_t capacity = levels_.TierAt(level).Usage(pool.tenant).capacity_bytes / limits::kExtentBytes;
  const uint64_t ahead = std::min(capacity / kPartAhead, kMostAhead);
  uint64_t& judged = queues_[pool.tenant].judged;
  if (judged >= extents + ahead / 2) {
    judged -= extents;
    return;
  }
  for (Entry* const victim : levels_[level].NextVictims(pool, extents + ahead)) Judge(*victim);
  judged = ahead;
}

void CopyScheduler::Judge(Entry& entry) {
  const bool coming = entry.copies[levels_.disk()].phase() != CopyPhase::kNone;
  if (!entry.memory_only || entry.judged || coming) return;
  entry.judged = true;
  if (!ssd_->health().degraded() && !ssd_->health().stalled()) {
    const TenantId tenant = entry.pool.tenant;
    const uint64_t horizon = ssd_->Usage(tenant).capacity_bytes / limits::kExtentBytes;
    entry.admitted =
        admission_.AdmitsEvicted(tenant, entry.header.key, entry.AtEviction(), entry.header.Extents(), horizon);
  }
  if (entry.admitted) QueueDown(entry);
  SetAdmitted(entry, entry.admitted && entry.queued_down);
}

void CopyScheduler::SetAdmitted(Entry& entry, bool admitted) {
  entry.admitted = admitted;
  entry.copies[levels_.memory() - 1].rank.dirty = entry.memory_only && admitted;
}

bool CopyScheduler::WantsCopyDown(const Entry& entry) {
  if (flushing_) {
    return ssd_ != nullptr && entry.memory_only && !levels_.OnDisk(entry) &&
           entry.transfer != Entry::Transfer::kOffered;
  }
  for (size_t i = 0; levels_.Below(i) < levels_.size(); ++i) {
    const size_t below = levels_.Below(i);
    const bool lacks = entry.copies[i].whole() && entry.copies[below].phase() == CopyPhase::kNone;
    if (lacks && Admits(entry, below)) return true;
  }
  return false;
}

bool CopyScheduler::Admits(const Entry& entry, size_t level) {
  if (!levels_.IsDisk(level)) return true;
  if (ssd_->health().degraded() || (entry.deferred && !entry.admitted)) return false;
  std::optional<Key> victim;
  if (levels_[level].Full(entry.pool, entry.header.Extents())) {
    const Entry* next = levels_[level].NextVictim(entry.pool);
    if (next == nullptr) return false;
    victim = next->header.key;
  }
  return entry.admitted || admission_.Admits(entry.pool.tenant, entry.header.key, victim);
}

bool CopyScheduler::CopyDown(Entry& entry) {
  const ObjectId id = entry.id;
  ObjectId& admitted = queues_[entry.pool.tenant].admitted;
  for (size_t i = 0; levels_.Below(i) < levels_.size(); ++i) {
    const size_t below = levels_.Below(i);
    if (!entry.copies[i].whole() || entry.copies[below].phase() != CopyPhase::kNone) continue;
    const bool to_disk = levels_.IsDisk(below);
    if (to_disk && ssd_->health().degraded()) continue;
    if (id != admitted && !Admits(entry, below)) continue;
    if (owner_.CopyDown(entry, i, below)) continue;
    // A disk may soon have space. Full memory is full of objects that others copy there: if this object waited for that
    // space and took it, they would take it back.
    if (to_disk) admitted = id;
    return !to_disk;
  }
  return true;
}

bool CopyScheduler::CopyToDisk(Entry& entry) {
  const auto from = std::ranges::find_if(entry.copies, &Copy::whole);
  if (!WantsCopyDown(entry) || from == entry.copies.end() || ssd_->health().degraded()) return true;
  if (levels_[levels_.disk()].Full(entry.pool, entry.header.Extents())) return false;
  return owner_.CopyDown(entry, static_cast<size_t>(from - entry.copies.begin()), levels_.disk());
}

void CopyScheduler::Flush(const std::vector<ObjectId>& order) {
  flushing_ = true;
  for (auto& [tenant, queue] : queues_) {
    for (const ObjectId waiting : std::exchange(queue.objects, {})) {
      if (Entry* entry = index_.EntryOf(waiting)) entry->queued_down = entry->admitted = false;
    }
  }
  for (const ObjectId next : order) {
    Entry& entry = *index_.EntryOf(next);
    entry.queued_down = WantsCopyDown(entry);
    if (entry.queued_down) queues_[entry.pool.tenant].objects.push_back(next);
  }
  if (ssd_ != nullptr) ssd_->health().Probe([this] { Pump(); });
  Pump();
}

void CopyScheduler::Pump() {
  for (auto& [tenant, queue] : queues_) Pump(queue);
  copier_.Pump();
}

void CopyScheduler::Pump(Queue& queue) {
  // A disk that is being tried may write in a moment.
  const bool waits = flushing_ && ssd_ != nullptr && ssd_->health().probing() && !ssd_->health().stalled();
  while (!waits && !queue.objects.empty() && queue.under_way < kMaxIdleCopies) {
    const ObjectId next = queue.objects.front();
    queue.objects.pop_front();
    Entry* entry = index_.EntryOf(next);
    if (entry == nullptr || entry->gone != MissReason::kNone) continue;
    entry->queued_down = false;
    const TenantPool pool = entry->pool;
    const bool done = flushing_ ? CopyToDisk(*entry) : CopyDown(*entry);
    entry = index_.EntryOf(next);
    if (entry == nullptr || entry->gone != MissReason::kNone) continue;
    if (done || !levels_[levels_.size() - 1].IsFreeing(pool)) {
      if (entry->admitted && entry->copies[levels_.disk()].phase() == CopyPhase::kNone) SetAdmitted(*entry, false);
      continue;
    }
    entry->queued_down = true;  // the extents that were evicted for it become free in a moment
    queue.objects.push_front(next);
    return;
  }
}

bool CopyScheduler::writing() const {
  const auto writes = [](const auto& tenant) { return !tenant.second.objects.empty() || tenant.second.under_way > 0; };
  return !(ssd_ != nullptr && ssd_->health().stalled()) && std::ranges::any_of(queues_, writes);
}

}  // namespace ashlar::storage
