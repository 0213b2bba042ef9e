// Whether a hit pays: what copying objects up from a tier takes, as it was measured, against computing them again.
#pragma once

#include <cstdint>
#include <map>

#include "proto/outcome.h"
#include "storage/executor.h"

namespace ashlar::storage {

class BringUpCost {
 public:
  // An object came up whole: from being asked for until its last byte was there, waiting for others included.
  void Measured(TierKind from, uint64_t bytes, Nanos took);
  // 0: nothing is known yet.
  Nanos Estimate(TierKind from, uint64_t bytes) const;
  // Whether to bring it up; `recompute` 0: the engine did not say. One in kProbe that do not pay is brought up all the
  // same, for a tier that was slow once would never be measured again.
  bool Pays(TierKind from, uint64_t bytes, Nanos recompute);

 private:
  static constexpr double kWeight = 0.125;  // of the latest measurement
  static constexpr uint64_t kProbe = 16;
  struct Tier {
    double nanos_per_byte = 0;
    uint64_t declined = 0;
  };
  std::map<TierKind, Tier> tiers_;
};

}  // namespace ashlar::storage
