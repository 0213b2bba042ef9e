// SPDX-License-Identifier: Apache-2.0
// MetricsText: the metrics in Prometheus' text format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace prometheus {
struct MetricFamily;
}

namespace ashlar::daemon {

// kSummed: without the label `tenant`. Samples that differ in nothing else become one, their values added up, so that
// the node is seen and no tenant.
enum class TenantLabel : uint8_t { kNamed, kSummed };

// Writes the families in Prometheus' text format, kMetricsType.
std::string MetricsText(std::vector<prometheus::MetricFamily> families, TenantLabel tenants);
inline constexpr char kMetricsType[] = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace ashlar::daemon
