// SPDX-License-Identifier: Apache-2.0
#include "storage/policy/promotion.h"

#include <algorithm>

namespace ashlar::storage {

void PromotionCost::Rate::Measured(uint64_t bytes, Nanos took) {
  nanos_ = kKept * nanos_ + static_cast<double>(took);
  bytes_ = kKept * bytes_ + static_cast<double>(bytes);
}

Nanos PromotionCost::Rate::Of(uint64_t bytes) const {
  return bytes_ == 0 ? 0 : static_cast<Nanos>(nanos_ / bytes_ * static_cast<double>(bytes));
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

bool PromotionCost::PaysToKeep(uint64_t bytes, Nanos recompute) {
  return recompute == 0 || landings_.rate.Of(bytes) <= recompute || Probe(landings_);
}

}  // namespace ashlar::storage
