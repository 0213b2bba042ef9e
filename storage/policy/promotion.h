// SPDX-License-Identifier: Apache-2.0
// PromotionCosts: the break-even check for hits. It compares the measured time to load and land an object with the time
// to recompute it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

#include "proto/outcome.h"
#include "storage/executor.h"

namespace ashlar::storage {

// Estimates grow with an object's bytes and follow recent measurements, weighted by bytes, so that the fixed cost of
// small copies does not make large ones look expensive.
class PromotionCost {
 public:
  // An object was loaded: from the request, including waiting, to the last byte.
  void Promoted(TierKind from, uint64_t bytes, Nanos began, Nanos ended);
  // A landing of `bytes` took `took`, without the time it waited for loading, which Promoted counts.
  void Landed(uint64_t bytes, Nanos took) { landings_.rate.Measured(bytes, took); }
  // The engine takes `took` to compute `flops`, as it declares. Ignored if either is 0, which means unknown.
  void Computed(double flops, Nanos took);

  // Returns the FLOPs that the engine computes while a byte is loaded from the tier: what a copy in a higher tier saves
  // as long as this one is there. 0: not measured yet.
  double FlopsPerByte(TierKind from) const;

  // Estimates the time until an object in `from` has landed, if `ahead` passes before it is needed. Unknown costs are
  // 0, and loading from the top tier costs 0. A landing may overlap the load, so the sum is an upper bound.
  Nanos Estimate(TierKind from, uint64_t bytes, Nanos ahead = 0) const;

  // Returns whether to use a hit that is needed after `ahead`, during which loading is free. `recompute` 0: unknown.
  // One in kProbe unprofitable hits is used anyway, because otherwise a cost that was once high would never be measured
  // again.
  bool Pays(TierKind from, uint64_t bytes, Nanos recompute, Nanos ahead = 0);
  // The same for a known load time whose source discards old measurements itself, so nothing is probed.
  bool PaysWith(Nanos copy, uint64_t bytes, Nanos recompute, Nanos ahead);
  // Objects that are loaded together, because a prefix needs all of them.
  static constexpr size_t kSources = static_cast<size_t>(TierKind::kRemote) + 1;
  struct Load {
    std::array<uint64_t, kSources> bytes{};  // indexed by source tier; kNone: bytes that need no load
    Nanos remote = 0;                        // time to fetch what comes from other nodes; 0: unknown

    Load& operator+=(const Load& other);
  };
  // Estimates the time until all of it has landed. Loads overlap, so a tier's rate is that of the time in which it
  // loads anything: the sum of the single objects' times would count the same waiting many times.
  Nanos Estimate(const Load& load, Nanos ahead) const;
  // Call it for a load that takes longer than computing. True: use it anyway, as Pays does once in kProbe times.
  bool ProbesLoad() { return ++declined_loads_ % kProbe == 0; }
  // Returns whether to store an offered object, assuming it will be landed from the top tier. Probes like Pays.
  bool PaysToKeep(uint64_t bytes, Nanos recompute);

 private:
  static constexpr uint64_t kProbe = 16;
  static constexpr double kKept = 0.875;  // weight of earlier measurements

  class Rate {
   public:
    void Measured(uint64_t bytes, Nanos took);
    double PerByte() const { return bytes_ == 0 ? 0 : nanos_ / bytes_; }  // nanoseconds; 0: not measured
    Nanos Of(uint64_t bytes) const;

   private:
    double nanos_ = 0, bytes_ = 0;
  };
  struct Way {
    Rate rate;
    Rate busy;           // time in which at least one object is loaded
    Nanos last_end = 0;  // end of the latest load
    uint64_t declined = 0;
  };
  static bool Probe(Way& way) { return ++way.declined % kProbe == 0; }

  std::map<TierKind, Way> copies_;  // keyed by source tier
  Way landings_;
  double flops_ = 0, nanos_ = 0;  // recent computing, as the engine declares it
  uint64_t declined_loads_ = 0;
};

// One per tenant, because waiting for a tenant's own copies says nothing about other tenants.
using PromotionCosts = std::map<TenantId, PromotionCost>;

}  // namespace ashlar::storage
