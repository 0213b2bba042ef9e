// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/holdings.h"

#include "daemon/observe/follow.h"

namespace ashlar::daemon {

HoldingsMetrics::HoldingsMetrics(prometheus::Registry& registry, const std::vector<std::string>& tenants) {
  const auto family = [&](const char* name, const char* help) -> prometheus::Family<prometheus::Gauge>& {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  };
  auto& region_bytes = family("ashlar_region_bytes", "Bytes of the regions of the tenant's sessions");
  auto& regions = family("ashlar_regions", "Regions of the tenant's sessions");
  auto& max_regions = family("ashlar_regions_limit", "Limit of the tenant's regions");
  auto& model_bytes = family("ashlar_model_bytes", "Memory of the models that the tenant's sessions have opened");
  auto& max_model_bytes = family("ashlar_model_limit_bytes", "Limit of that memory");
  auto& unsent = prometheus::BuildCounter()
                     .Name("ashlar_descriptor_send_failures_total")
                     .Help("Replies refused because engines had not read earlier descriptors")
                     .Register(registry);
  auto& refused = prometheus::BuildCounter()
                      .Name("ashlar_rate_limited_requests_total")
                      .Help("Calls, landings and publishes rejected because of the tenant's rate limits")
                      .Register(registry);
  for (const std::string& tenant : tenants) {
    const prometheus::Labels labels = {{"tenant", tenant}};
    gauges_.push_back({&region_bytes.Add(labels), &regions.Add(labels), &max_regions.Add(labels),
                       &model_bytes.Add(labels), &max_model_bytes.Add(labels), &unsent.Add(labels),
                       &refused.Add({{"tenant", tenant}, {"limit", "calls_per_second"}}),
                       &refused.Add({{"tenant", tenant}, {"limit", "bytes_per_second"}})});
  }
}

void HoldingsMetrics::Set(const std::vector<Holdings>& holdings) {
  for (size_t i = 0; i < holdings.size(); ++i) {
    const Gauges& gauges = gauges_.at(i);
    gauges.region_bytes->Set(static_cast<double>(holdings[i].region_bytes));
    gauges.regions->Set(static_cast<double>(holdings[i].regions));
    gauges.max_regions->Set(static_cast<double>(holdings[i].max_regions));
    gauges.model_bytes->Set(static_cast<double>(holdings[i].model_bytes));
    gauges.max_model_bytes->Set(static_cast<double>(holdings[i].max_model_bytes));
    Follow(*gauges.unsent, holdings[i].unsent_descriptors);
    Follow(*gauges.beyond_calls, holdings[i].beyond_calls_per_second);
    Follow(*gauges.beyond_bytes, holdings[i].beyond_bytes_per_second);
  }
}

}  // namespace ashlar::daemon
