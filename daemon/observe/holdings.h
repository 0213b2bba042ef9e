// Holdings: the resources that each tenant's sessions hold of the daemon, in Prometheus' terms.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "storage/transfer/rates.h"

namespace ashlar::daemon {

// The resources of one tenant's sessions, at one moment.
struct Holdings {
  uint64_t region_bytes = 0;
  uint64_t regions = 0, max_regions = 0;
  uint64_t model_bytes = 0, max_model_bytes = 0;
  uint64_t unsent_descriptors = 0;                // ever
  std::map<storage::RateKind, uint64_t> refused;  // ever, by the rate that was used up
};

// Not thread-safe.
class HoldingsMetrics {
 public:
  HoldingsMetrics(prometheus::Registry& registry, const std::vector<std::string>& tenants);
  void Set(const std::vector<Holdings>& holdings);  // by tenant

 private:
  struct Gauges {
    prometheus::Gauge *region_bytes, *regions, *max_regions, *model_bytes, *max_model_bytes;
    prometheus::Counter* unsent;
    std::map<storage::RateKind, prometheus::Counter*> refused;
  };
  std::vector<Gauges> gauges_;  // by tenant
};

}  // namespace ashlar::daemon
