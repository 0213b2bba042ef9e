// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/levels.h"

#include <algorithm>

namespace ashlar::storage {

Levels::Levels(const Tiers& tiers, const ReuseModels* uses, const PromotionCosts& costs, Observer& observer)
    : sibling_count_(tiers.sibling_count),
      common_(tiers.common),
      memory_(tiers.memory.size()),
      ssd_(tiers.ssd),
      disk_level_(tiers.ssd == nullptr ? kNowhere : tiers.memory.size()),
      source_(tiers.remote) {
  std::vector<Tier*> all = tiers.memory;
  if (ssd_ != nullptr) all.push_back(ssd_);
  for (Tier* tier : all) {
    if (uses != nullptr) {
      policies_.push_back(std::make_unique<PricePolicy>(*uses, costs));
    } else {
      policies_.push_back(std::make_unique<LruPolicy>());
    }
    levels_.push_back(std::make_unique<Level>(*tier, *policies_.back(), observer));
  }
}

PoolShares Levels::pools() const {
  PoolShares shares;
  for (const auto& level : levels_) level->AddTo(shares);
  return shares;
}

TierKind Levels::Nearest(const Entry& entry) const {
  for (size_t i = 0; i <= remote(); ++i) {
    if (entry.copies[i].readable()) return kind(i);
  }
  return TierKind::kNone;
}

TierKind Levels::NearestTo(const Entry& entry, size_t level) const {
  if (entry.copies[level].readable()) return kind(level);
  for (size_t i = Below(level); i <= remote(); ++i) {
    if (entry.copies[i].readable()) return kind(i);
  }
  return Nearest(entry);
}

size_t Levels::LevelToSendFrom(const Entry& entry) const {
  if (entry.copies[common_].whole()) return common_;
  const size_t on_gpu = OnAnotherGpu(entry, common_);
  return on_gpu == kNowhere ? common_ : on_gpu;
}

size_t Levels::SourceBelow(const Entry& entry, size_t level) const {
  for (size_t from = Below(level); from <= remote(); ++from) {
    const bool comes =
        from < memory_ ? entry.copies[from].phase() == CopyPhase::kCopying : IsCopiedFromBelow(entry, from);
    if (entry.copies[from].readable() || comes) return from;
  }
  return kNowhere;
}

TierKind Levels::Lower(const Entry& entry, size_t level) const {
  for (size_t i = Below(level); i < levels_.size(); ++i) {
    if (entry.copies[i].whole()) return kind(i);
  }
  const bool leased = entry.copies[remote()].readable(), fetched = entry.fetched_from != 0 && entry.uses <= 1;
  const bool at_peer = leased || fetched || entry.transfer == Entry::Transfer::kAccepted;
  return at_peer ? TierKind::kRemote : TierKind::kNone;
}

size_t Levels::OnAnotherGpu(const Entry& entry, size_t level) const {
  for (size_t i = 0; i < sibling_count_; ++i) {
    if (i != level && entry.copies[i].whole()) return i;
  }
  return kNowhere;
}

bool Levels::IsCopiedFrom(const Entry& entry, size_t level, size_t source) {
  return entry.copies[level].phase() == CopyPhase::kCopying && entry.copies[level].source == source;
}

bool Levels::IsCopiedFromBelow(const Entry& entry, size_t level) {
  return entry.copies[level].phase() == CopyPhase::kCopying && entry.copies[level].source > level;
}

std::vector<TierKind> Levels::TiersOf(const Entry* entry) const {
  std::vector<TierKind> tiers;
  for (size_t i = 0; entry != nullptr && entry->ready && i < levels_.size(); ++i) {
    if (entry->copies[i].whole()) tiers.push_back(kind(i));
  }
  return tiers;
}

bool Levels::OnDisk(const Entry& entry) const {
  return ssd_ != nullptr && entry.copies[disk_level_].phase() != CopyPhase::kNone;
}

bool Levels::IsStalled(const Entry& entry, size_t level) const {
  if (ssd_ == nullptr || !ssd_->health().stalled()) return false;
  while (level < memory_) {
    const Copy& copy = entry.copies[level];
    const bool comes = copy.phase() == CopyPhase::kCopying || copy.phase() == CopyPhase::kDraining;
    if (!comes || copy.source <= level) return false;
    level = copy.source;
  }
  return IsDisk(level);
}

bool Levels::OnStalledDiskAlone(const Entry& entry) const {
  if (ssd_ == nullptr || !ssd_->health().stalled() || !entry.copies[disk_level_].readable()) return false;
  return std::none_of(entry.copies.begin(), entry.copies.begin() + static_cast<ptrdiff_t>(memory_),
                      [](const Copy& copy) { return copy.whole(); });
}

MissReason Levels::Lost(const Entry& entry, size_t level) const {
  if (entry.gone != MissReason::kNone) return entry.gone;
  return IsStalled(entry, level) ? MissReason::kTierError : MissReason::kNone;
}

void Levels::Touch(Entry& entry) {
  for (size_t i = 0; i < levels_.size(); ++i) {
    if (entry.copies[i].rank.tracked()) levels_[i]->Touch(entry.copies[i].rank);
  }
}

}  // namespace ashlar::storage
