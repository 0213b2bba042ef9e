// SPDX-License-Identifier: Apache-2.0
// Objects on other nodes: adoption, and release once this node has its own copy or no use for them. Also reports of
// where objects reside on this node.
#include <algorithm>
#include <utility>

#include "storage/objects/placement.h"

namespace ashlar::storage {

using State = Copy::State;

void Placement::AdoptRemote(Entry& entry, RemoteCopyId copy, Nanos cost) {
  entry.remote = entry.came_by = copy;
  entry.remote_cost = cost;
  RemoteOf(entry).state = State::kWhole;
  RemoteOf(entry).loaded = entry.header.Extents();
  Refresh(entry);
}

void Placement::RemoveRemote(Entry& entry) {
  RemoteOf(entry).state = State::kNone;
  RemoteOf(entry).loaded = 0;
  const RemoteCopyId copy = std::exchange(entry.remote, 0);
  Refresh(entry);
  remote_->Release(copy);
}

void Placement::LeaveRemote(Entry& entry) {
  if (entry.remote == 0 || RemoteOf(entry).readers > 0) return;
  const auto own = entry.copies.begin() + static_cast<ptrdiff_t>(levels());
  if (std::ranges::any_of(entry.copies.begin(), own, &Copy::whole)) RemoveRemote(entry);
}

void Placement::Distrust(Entry& entry) {
  entry.damaged = true;
  if (entry.came_by != 0) remote_->Damaged(std::exchange(entry.came_by, 0));
}

bool Placement::DropIfRemote(Entry& entry) {
  if (entry.remote == 0 || entry.gone != MissReason::kNone || entry.references > 0 || entry.pinned) return false;
  const bool elsewhere = std::ranges::any_of(entry.copies.begin(), entry.copies.begin() + levels(),
                                             [](const Copy& copy) { return copy.state != State::kNone; });
  if (elsewhere || RemoteOf(entry).readers > 0) return false;
  events_.lost(entry, MissReason::kNeverSeen, PolicyKind::kNone, TierKind::kRemote);
  return true;
}

void Placement::Reside(Entry& entry, bool here) {
  const auto end = entry.copies.begin() + static_cast<ptrdiff_t>(levels());
  const auto nearest = std::find_if(entry.copies.begin(), end, [](const Copy& copy) { return copy.whole(); });
  const auto level = static_cast<size_t>(nearest - entry.copies.begin());
  const TierKind now = here && nearest != end ? kind(level) : TierKind::kNone;
  const auto at = static_cast<uint8_t>(now == TierKind::kNone ? 0 : level);
  const bool saved = here && disk_ != nullptr && entry.copies[disk_level_].whole();
  if (now == entry.resides && at == entry.resides_at && saved == entry.saved) return;
  entry.resides = now;
  entry.resides_at = at;
  entry.saved = saved;
  events_.resides(entry);
}

}  // namespace ashlar::storage
