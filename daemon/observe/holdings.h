// SPDX-License-Identifier: Apache-2.0
// Holdings: Prometheus metrics of the resources that each tenant's sessions hold.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ashlar::daemon {

// A snapshot of the resources of one tenant's sessions.
struct Holdings {
  uint64_t region_bytes = 0;
  uint64_t regions = 0, max_regions = 0;
  uint64_t model_bytes = 0, max_model_bytes = 0;
  uint64_t unsent_descriptors = 0;                                    // total since the start
  uint64_t beyond_calls_per_second = 0, beyond_bytes_per_second = 0;  // refused since the start
};

// Not thread-safe.
class HoldingsMetrics {
 public:
  HoldingsMetrics(prometheus::Registry& registry, const std::vector<std::string>& tenants);
  void Set(const std::vector<Holdings>& holdings);  // index is the TenantId

 private:
  struct Gauges {
    prometheus::Gauge *region_bytes, *regions, *max_regions, *model_bytes, *max_model_bytes;
    prometheus::Counter *unsent, *beyond_calls, *beyond_bytes;
  };
  std::vector<Gauges> gauges_;  // index is the TenantId
};

}  // namespace ashlar::daemon
