// SPDX-License-Identifier: Apache-2.0
// PromotionCosts: the break-even check for hits. It compares the measured time to load and land an object with the time
// to recompute it.
#pragma once

#include <cstdint>
#include <map>

#include "proto/outcome.h"
#include "storage/executor.h"

namespace ashlar::storage {

// Estimates grow with an object's bytes and follow recent measurements, weighted by bytes, so that the fixed cost of
// small copies does not make large ones look expensive.
class PromotionCost {
 public:
  // An object was loaded: `took` is from the request to the last byte, including waiting.
  void Promoted(TierKind from, uint64_t bytes, Nanos took) { copies_[from].rate.Measured(bytes, took); }
  // A landing of `bytes` took `took`, without the time it waited for loading, which Promoted counts.
  void Landed(uint64_t bytes, Nanos took) { landings_.rate.Measured(bytes, took); }

  // Estimates the time until an object in `from` has landed, if `ahead` passes before it is needed. Unknown costs are
  // 0, and loading from the top tier costs 0. A landing may overlap the load, so the sum is an upper bound.
  Nanos Estimate(TierKind from, uint64_t bytes, Nanos ahead = 0) const;

  // Returns whether to use a hit that is needed after `ahead`, during which loading is free. `recompute` 0: unknown.
  // One in kProbe unprofitable hits is used anyway, because otherwise a cost that was once high would never be measured
  // again.
  bool Pays(TierKind from, uint64_t bytes, Nanos recompute, Nanos ahead = 0);
  // The same for a known load time whose source discards old measurements itself, so nothing is probed.
  bool PaysWith(Nanos copy, uint64_t bytes, Nanos recompute, Nanos ahead);
  // Returns whether to store an offered object, assuming it will be landed from the top tier. Probes like Pays.
  bool PaysToKeep(uint64_t bytes, Nanos recompute);

 private:
  static constexpr uint64_t kProbe = 16;

  class Rate {
   public:
    void Measured(uint64_t bytes, Nanos took);
    Nanos Of(uint64_t bytes) const;

   private:
    static constexpr double kKept = 0.875;  // weight of earlier measurements
    double nanos_ = 0, bytes_ = 0;
  };
  struct Way {
    Rate rate;
    uint64_t declined = 0;
  };
  static bool Probe(Way& way) { return ++way.declined % kProbe == 0; }

  std::map<TierKind, Way> copies_;  // by source tier
  Way landings_;
};

// One per tenant, because waiting for a tenant's own copies says nothing about other tenants.
using PromotionCosts = std::map<TenantId, PromotionCost>;

}  // namespace ashlar::storage
