// SPDX-License-Identifier: Apache-2.0
// Holds on copies for in-place readers, and the handling of damaged copies.
#include <algorithm>

#include "storage/objects/placement.h"

namespace ashlar::storage {

bool Placement::Hold(Entry& entry, size_t level) {
  Copy& copy = entry.copies[level];
  if (entry.gone != MissReason::kNone || !entry.ready || !copy.whole()) return false;
  if (levels_[level]->tier().gpu() != nullptr) return false;
  ++copy.readers;
  Refresh(entry);
  return true;
}

void Placement::LetGo(Entry& entry, size_t level) {
  DoneReading(entry, level);
  entry.gone == MissReason::kNone ? Refresh(entry) : Vacate(entry);
}

void Placement::Damaged(Entry& entry, size_t level, MissReason why) {
  if (entry.gone != MissReason::kNone) return;
  const auto is_whole = [](const Copy& copy) { return copy.whole(); };
  const bool others = std::count_if(entry.copies.begin(), entry.copies.begin() + levels(), is_whole) > 1;
  const bool used = entry.copies[level].readers > 0 || entry.copies[level].users > 0;
  if (!entry.copies[level].whole()) return;  // ended meanwhile
  entry.damaged |= why == MissReason::kChecksumFailed;
  if (!others || used) return events_.lost(entry, why, PolicyKind::kNone, kind(level));
  GiveUp(entry, level);
}

// Background copies yield to others, so their duration says nothing about the copy time.
void Placement::Promoted(const Entry& entry) {
  const Nanos now = clock_.Now();
  if (entry.needed_at > entry.asked_at) {
    observer_.Prefetched(entry.pool.tenant, now <= entry.needed_at);
  } else {
    promotion_[entry.pool.tenant].Promoted(kind(entry.asked_of), entry.header.bytes, now - entry.asked_at);
  }
}

}  // namespace ashlar::storage
