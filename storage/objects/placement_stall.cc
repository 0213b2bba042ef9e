// SPDX-License-Identifier: Apache-2.0
// A stalled disk (SsdTier::stalled): callers do not wait for copies from it. Copies in flight keep their slots and
// continue when the disk answers.
#include <vector>

#include "storage/objects/placement.h"

namespace ashlar::storage {

using State = Copy::State;

bool Placement::Stalled(const Entry& entry, size_t level) const {
  if (disk_ == nullptr || !disk_->stalled()) return false;
  while (level < memory_) {
    const Copy& copy = entry.copies[level];
    const bool comes = copy.state == State::kCopying || copy.state == State::kDraining;
    if (!comes || copy.source <= level) return false;
    level = copy.source;
  }
  return IsDisk(level);
}

MissReason Placement::Lost(const Entry& entry, size_t level) const {
  if (entry.gone != MissReason::kNone) return entry.gone;
  return Stalled(entry, level) ? MissReason::kTierError : MissReason::kNone;
}

bool Placement::OnStalledDisk(const Entry& entry) const {
  if (disk_ == nullptr || !disk_->stalled() || !entry.copies[disk_level_].readable()) return false;
  for (size_t i = 0; i < memory_; ++i) {
    if (entry.copies[i].whole()) return false;
  }
  return true;
}

void Placement::EndWaits() {
  if (disk_ == nullptr || !disk_->stalled()) return;
  const std::vector<ObjectId> waited_for(from_disk_.begin(), from_disk_.end());  // callers that wait may end copies
  for (const ObjectId id : waited_for) {
    if (Entry* const entry = events_.find(id)) CallWaiters(*entry);
  }
}

}  // namespace ashlar::storage
