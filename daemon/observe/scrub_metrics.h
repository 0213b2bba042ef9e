// SPDX-License-Identifier: Apache-2.0
// ScrubMetrics: Prometheus metrics of checksum verification.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <map>

#include "proto/outcome.h"
#include "storage/upkeep/scrubber.h"

namespace ashlar::daemon {

// One thread only. All metrics exist from the start with value 0.
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
