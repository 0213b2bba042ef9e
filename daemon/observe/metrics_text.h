// SPDX-License-Identifier: Apache-2.0
// MetricsText: writes metrics in Prometheus' text format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace prometheus {
struct MetricFamily;
}

namespace ashlar::daemon {

// kSummed: removes the label `tenant` and adds up samples that then have equal labels, so that no tenant is visible.
enum class TenantLabel : uint8_t { kNamed, kSummed };

// Writes the families in Prometheus' text format, kMetricsType.
std::string MetricsText(std::vector<prometheus::MetricFamily> families, TenantLabel tenants);
inline constexpr char kMetricsType[] = "text/plain; version=0.0.4; charset=utf-8";

}  // namespace ashlar::daemon
