// SPDX-License-Identifier: Apache-2.0
// Promotes objects to the memory tier from which an engine lands: from a lower tier, or from another GPU through the
// tier below.
#include <algorithm>
#include <utility>

#include "storage/objects/object_bytes.h"
#include "storage/objects/placement.h"

namespace ashlar::storage {

using State = Copy::State;

TierKind Placement::NearestTo(const Entry& entry, size_t level) const {
  if (entry.copies[level].readable()) return kind(level);
  for (size_t i = Below(level); i <= levels(); ++i) {
    if (entry.copies[i].readable()) return kind(i);
  }
  return Nearest(entry);
}

size_t Placement::WhereItLies(const Entry& entry) const {
  if (entry.copies[common_].whole()) return common_;
  const size_t on_gpu = OnAnotherGpu(entry, common_);
  return on_gpu == kNowhere ? common_ : on_gpu;
}

size_t Placement::NearestSource(const Entry& entry, size_t level) const {
  for (size_t from = Below(level); from <= levels(); ++from) {
    const bool comes = from < memory_ ? entry.copies[from].state == State::kCopying : CopiedFromBelow(entry, from);
    if (entry.copies[from].readable() || comes) return from;
  }
  return kNowhere;
}

size_t Placement::OnAnotherGpu(const Entry& entry, size_t level) const {
  for (size_t i = 0; i < beside_; ++i) {
    if (i != level && entry.copies[i].whole()) return i;
  }
  return kNowhere;
}

MissReason Placement::Promote(Entry& entry, size_t level, const Recompute& recompute, Nanos needed_at) {
  const Nanos now = clock_.Now();
  needed_at = std::max(now, needed_at);
  if (Stalled(entry, level)) return MissReason::kTierError;
  const Copy& copy = entry.copies[level];
  // Its last promotion was abandoned, but a write is still in flight; it is promoted again afterwards.
  const bool drains = copy.state == State::kDraining, awaited = drains && copy.users > 1;
  if (copy.whole() || copy.state == State::kCopying || awaited) {
    if (!promotion_[entry.pool.tenant].Pays(kind(level), entry.header.bytes, recompute.time))
      return MissReason::kSlowerThanRecompute;
    const bool comes = copy.state == State::kCopying && copy.source == remote_level_ && entry.remote != 0;
    if (comes) remote_->SetRecompute(entry.remote, recompute.of_remote);
    Hasten(entry, needed_at);
    return MissReason::kNone;
  }
  size_t from = NearestSource(entry, level);
  if (from == kNowhere) from = OnAnotherGpu(entry, level);
  if (from == kNowhere) return MissReason::kBudgetRefused;  // just given up there, and draining
  if (IsDisk(from) ? disk_->stalled() : Stalled(entry, from)) return MissReason::kTierError;
  PromotionCost& cost = promotion_[entry.pool.tenant];
  const bool pays = from == remote_level_ && entry.remote_cost > 0
                        ? cost.PaysWith(entry.remote_cost, entry.header.bytes, recompute.of_remote, needed_at - now)
                        : cost.Pays(kind(from), entry.header.bytes, recompute.time, needed_at - now);
  if (!pays) return MissReason::kSlowerThanRecompute;
  if (from == remote_level_) remote_->SetRecompute(entry.remote, recompute.of_remote);
  entry.asked_at = now;
  entry.asked_of = from;
  entry.needed_at = needed_at;
  if (drains) return MissReason::kNone;
  return Fetch(entry, level) ? MissReason::kNone : MissReason::kBudgetRefused;
}

// A copy from one GPU to another goes through the tier below both.
bool Placement::Fetch(Entry& entry, size_t level) {
  if (const size_t below = NearestSource(entry, level); below != kNowhere) return PromoteFrom(entry, level, below);
  const size_t beside = OnAnotherGpu(entry, level);
  if (beside == kNowhere || beside_ >= memory_ || entry.copies[beside_].state != State::kNone) return false;
  if (!PromoteFrom(entry, beside_, beside)) return false;
  const Copy& copy = entry.copies[level];
  return level == beside_ || copy.whole() || copy.tier_copy != nullptr || PromoteFrom(entry, level, beside_);
}

bool Placement::PromoteFrom(Entry& entry, size_t level, size_t from) {
  // Making room may end another shard of the bundle, and with it this entry or its last use.
  ++entry.holds;
  ++entry.copies[from].readers;  // prevents eviction of the source while room is made
  Refresh(entry);
  Copy& copy = entry.copies[level];
  const bool room = copy.state == State::kCopying || MakeRoom(entry, level, entry.header.Extents());
  const auto wanted = [&] { return room && entry.gone == MissReason::kNone && copy.state == State::kCopying; };
  copy.source = static_cast<uint8_t>(from);
  // A tier in between also gets a copy if it has room and the bytes pass through it.
  const bool straight = from == remote_level_ && copier_.ReadsStraightTo(levels_[level]->tier());
  std::vector<size_t> path = {from};
  for (size_t between = from - 1; !straight && from > level && wanted() && between >= Below(level); --between) {
    const bool vacant = entry.copies[between].state == State::kNone && !IsDisk(between);
    if (!vacant || !MakeRoom(entry, between, entry.header.Extents())) continue;
    entry.copies[between].source = static_cast<uint8_t>(from);
    path.push_back(between);
  }
  const bool goes_on = wanted();
  for (const size_t filled : path) {
    if (!goes_on && filled < from && entry.copies[filled].state == State::kCopying) Break(entry, filled);
  }
  DoneReading(entry, from);
  --entry.holds;
  if (!goes_on) {
    entry.gone == MissReason::kNone ? Refresh(entry) : Vacate(entry);
    return false;
  }
  Refresh(entry);
  // Engines read the header in place, before the rest has arrived.
  WriteStart(levels_[level]->tier(), copy.slot, EncodeHeader(entry.header));
  path.push_back(level);
  // A copy down starts in the background and is then hastened.
  const Nanos needed_at = from < level ? TierCopier::kWhenIdle : entry.needed_at;
  for (size_t i = 1; i < path.size(); ++i) StartCopy(entry, path[i - 1], path[i], needed_at);
  Hasten(entry, entry.needed_at);  // a copy in between may already be in flight
  copier_.Pump();
  return true;
}

}  // namespace ashlar::storage
