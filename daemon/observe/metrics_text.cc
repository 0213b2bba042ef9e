// SPDX-License-Identifier: Apache-2.0
#include "daemon/observe/metrics_text.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <map>
#include <utility>

namespace ashlar::daemon {
namespace {

using prometheus::ClientMetric;

void AddTo(ClientMetric& sum, const ClientMetric& one) {
  sum.counter.value += one.counter.value;
  sum.gauge.value += one.gauge.value;
  sum.histogram.sample_count += one.histogram.sample_count;
  sum.histogram.sample_sum += one.histogram.sample_sum;
  for (size_t i = 0; i < sum.histogram.bucket.size(); ++i) {  // same family, so the same bounds
    sum.histogram.bucket[i].cumulative_count += one.histogram.bucket.at(i).cumulative_count;
  }
}

void SumTenants(prometheus::MetricFamily& family) {
  std::map<std::vector<ClientMetric::Label>, ClientMetric> sums;
  for (ClientMetric& metric : family.metric) {
    std::erase_if(metric.label, [](const ClientMetric::Label& label) { return label.name == "tenant"; });
    const auto [sum, fresh] = sums.try_emplace(metric.label, metric);
    if (!fresh) AddTo(sum->second, metric);
  }
  family.metric.clear();
  for (auto& [labels, sum] : sums) family.metric.push_back(std::move(sum));
}

}  // namespace

std::string MetricsText(std::vector<prometheus::MetricFamily> families, TenantLabel tenants) {
  if (tenants == TenantLabel::kSummed) {
    for (prometheus::MetricFamily& family : families) SumTenants(family);
  }
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace ashlar::daemon
