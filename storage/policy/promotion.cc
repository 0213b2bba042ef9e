// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/promotion.h"

#include <algorithm>

namespace ashlar::storage {

void PromotionCost::Rate::Measured(uint64_t bytes, Nanos took) {
  nanos_ = kKept * nanos_ + static_cast<double>(took);
  bytes_ = kKept * bytes_ + static_cast<double>(bytes);
}

Nanos PromotionCost::Rate::Of(uint64_t bytes) const {
  return static_cast<Nanos>(PerByte() * static_cast<double>(bytes));
}

void PromotionCost::Computed(double flops, Nanos took) {
  if (!(flops > 0) || took <= 0) return;
  flops_ = kKept * flops_ + flops;
  nanos_ = kKept * nanos_ + static_cast<double>(took);
}

double PromotionCost::FlopsPerByte(TierKind from) const {
  const auto copies = copies_.find(from);
  return copies == copies_.end() || nanos_ == 0 ? 0 : copies->second.busy.PerByte() * flops_ / nanos_;
}

Nanos PromotionCost::Estimate(TierKind from, uint64_t bytes, Nanos ahead) const {
  const auto copies = copies_.find(from);
  const Nanos copy = copies == copies_.end() ? 0 : copies->second.rate.Of(bytes);
  return std::max<Nanos>(copy - ahead, 0) + landings_.rate.Of(bytes);
}

bool PromotionCost::Pays(TierKind from, uint64_t bytes, Nanos recompute, Nanos ahead) {
  return recompute == 0 || Estimate(from, bytes, ahead) <= recompute || Probe(copies_[from]);
}

bool PromotionCost::PaysWith(Nanos copy, uint64_t bytes, Nanos recompute, Nanos ahead) {
  return recompute == 0 || std::max<Nanos>(copy - ahead, 0) + landings_.rate.Of(bytes) <= recompute;
}

void PromotionCost::Promoted(TierKind from, uint64_t bytes, Nanos began, Nanos ended) {
  Way& way = copies_[from];
  way.rate.Measured(bytes, ended - began);
  way.busy.Measured(bytes, ended - std::max(began, way.last_end));
  way.last_end = ended;
}

PromotionCost::Load& PromotionCost::Load::operator+=(const Load& other) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] += other.bytes[i];
  remote += other.remote;
  return *this;
}

Nanos PromotionCost::Estimate(const Load& load, Nanos ahead) const {
  Nanos copy = load.remote;
  uint64_t all = 0;
  for (size_t i = 0; i < load.bytes.size(); ++i) {
    all += load.bytes[i];
    const auto from = static_cast<TierKind>(i);
    const auto way = copies_.find(from);
    const bool known = from == TierKind::kRemote && load.remote > 0;
    if (way != copies_.end() && !known) copy += way->second.busy.Of(load.bytes[i]);
  }
  return std::max<Nanos>(copy - ahead, 0) + landings_.rate.Of(all);
}

bool PromotionCost::PaysToKeep(uint64_t bytes, Nanos recompute) {
  return recompute == 0 || landings_.rate.Of(bytes) <= recompute || Probe(landings_);
}

}  // namespace ashlar::storage
