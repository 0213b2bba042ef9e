#include "storage/policy/bring_up.h"

namespace ashlar::storage {

void BringUpCost::Measured(TierKind from, uint64_t bytes, Nanos took) {
  double& rate = tiers_[from].nanos_per_byte;
  const double now = static_cast<double>(took) / static_cast<double>(bytes);
  rate = rate == 0 ? now : rate + kWeight * (now - rate);
}

Nanos BringUpCost::Estimate(TierKind from, uint64_t bytes) const {
  const auto tier = tiers_.find(from);
  return tier == tiers_.end() ? 0 : static_cast<Nanos>(tier->second.nanos_per_byte * static_cast<double>(bytes));
}

bool BringUpCost::Pays(TierKind from, uint64_t bytes, Nanos recompute) {
  if (recompute == 0 || Estimate(from, bytes) <= recompute) return true;
  return ++tiers_[from].declined % kProbe == 0;
}

}  // namespace ashlar::storage
