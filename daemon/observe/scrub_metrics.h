// SPDX-License-Identifier: Apache-2.0
// ScrubMetrics: how far the verification of checksums is, for Prometheus.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <map>

#include "proto/outcome.h"
#include "storage/upkeep/scrubber.h"

namespace ashlar::daemon {

// One thread. All are there from the start, at 0.
class ScrubMetrics {
 public:
  explicit ScrubMetrics(prometheus::Registry& registry);
  void Set(const storage::Scrubber::Totals& totals);

 private:
  struct OfTier {
    prometheus::Counter *bytes, *damaged;
  };
  std::map<TierKind, OfTier> tiers_;
  prometheus::Counter& passes_;
  prometheus::Gauge &last_, &took_;
};

}  // namespace ashlar::daemon
