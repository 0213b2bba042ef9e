// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/holdings.h"

#include "daemon/observe/follow.h"

namespace ashlar::daemon {

HoldingsMetrics::HoldingsMetrics(prometheus::Registry& registry, const std::vector<std::string>& tenants) {
  const auto family = [&](const char* name, const char* help) -> prometheus::Family<prometheus::Gauge>& {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
  };
  auto& region_bytes = family("ashlar_region_bytes", "Regions of the tenant's sessions");
  auto& regions = family("ashlar_regions", "Regions of the tenant's sessions, each a mapping");
  auto& max_regions = family("ashlar_regions_limit", "The tenant's budget of regions");
  auto& model_bytes = family("ashlar_model_bytes", "What the models take that the tenant's sessions have opened");
  auto& max_model_bytes = family("ashlar_model_bytes_limit", "The tenant's budget of them");
  auto& unsent = prometheus::BuildCounter()
                     .Name("ashlar_unsent_descriptors_total")
                     .Help("Replies whose descriptor could not be sent, since engines had not read theirs")
                     .Register(registry);
  auto& refused = prometheus::BuildCounter()
                      .Name("ashlar_rate_refusals_total")
                      .Help("Calls, landings and publishes beyond what the tenant may have in a second")
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
