// SPDX-License-Identifier: Apache-2.0
// PromotionCosts: whether a hit pays. It compares the measured time of copying an object up from a tier and landing it
// with the time of computing it again.
#pragma once

#include <cstdint>
#include <map>

#include "proto/outcome.h"
#include "storage/executor.h"

namespace ashlar::storage {

// Estimates grow with an object's bytes. They follow the latest measurements, each of which counts by its bytes: what
// every copy costs however small it is does not make large ones look dear.
class PromotionCost {
 public:
  // An object came up whole: from being asked for until its last byte was there, waiting for others included.
  void Promoted(TierKind from, uint64_t bytes, Nanos took) { copies_[from].rate.Measured(bytes, took); }
  // A landing of so many bytes: from its start until its end, without what it waited for bytes on their way up, which
  // the copy counts.
  void Landed(uint64_t bytes, Nanos took) { landings_.rate.Measured(bytes, took); }

  // Estimates the time until an object that lies in `from` has landed, of which `ahead` passes before it is needed.
  // Unknown costs count as 0, and copying from the top costs 0. A landing may begin before the copy has ended, so the
  // sum is an upper bound.
  Nanos Estimate(TierKind from, uint64_t bytes, Nanos ahead = 0) const;

  // Returns whether to take a hit that is needed after `ahead`, during which copying costs nobody any time; `recompute`
  // 0: the engine did not say. One in kProbe hits that do not pay is taken anyway: otherwise a cost that was high once
  // would never be measured again.
  bool Pays(TierKind from, uint64_t bytes, Nanos recompute, Nanos ahead = 0);
  // The same where the copy's time is known from elsewhere, which erases old measurements itself: nothing is probed.
  bool PaysWith(Nanos copy, uint64_t bytes, Nanos recompute, Nanos ahead);
  // Returns whether to keep an offered object: at best it will be had from the top. Probes as Pays does.
  bool PaysToKeep(uint64_t bytes, Nanos recompute);

 private:
  static constexpr uint64_t kProbe = 16;

  class Rate {
   public:
    void Measured(uint64_t bytes, Nanos took);
    Nanos Of(uint64_t bytes) const;

   private:
    static constexpr double kKept = 0.875;  // of earlier measurements at each new one
    double nanos_ = 0, bytes_ = 0;
  };
  struct Way {
    Rate rate;
    uint64_t declined = 0;
  };
  static bool Probe(Way& way) { return ++way.declined % kProbe == 0; }

  std::map<TierKind, Way> copies_;  // by where they come from
  Way landings_;
};

// Each tenant's own: what one waits behind its own copies and landings says nothing of what others' take.
using PromotionCosts = std::map<TenantId, PromotionCost>;

}  // namespace ashlar::storage
