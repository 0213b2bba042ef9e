// SPDX-License-Identifier: Apache-2.0
// ProcessMetrics: the daemon's process metrics under Prometheus' standard names, and the result of the last
// configuration reload.
#pragma once

#include <prometheus/gauge.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>

#include <vector>

namespace ashlar::daemon {

// Any thread.
class ProcessMetrics {
 public:
  explicit ProcessMetrics(prometheus::Registry& registry);
  // Records the result of a reload. A refused reload changes nothing.
  void Reloaded(bool accepted);
  // Adds the kernel's current values. Without /proc some families are missing.
  void AddTo(std::vector<prometheus::MetricFamily>& families) const;

 private:
  const double started_;  // Unix time; 0: unknown
  prometheus::Gauge &reloaded_, &reloaded_at_;
};

}  // namespace ashlar::daemon
