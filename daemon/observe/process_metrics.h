// SPDX-License-Identifier: Apache-2.0
// ProcessMetrics: what the daemon's process takes of the machine, under the names that Prometheus' own libraries use,
// and whether the configuration that it runs with is its file's.
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
  // The end of a reload: of one that was refused nothing has changed.
  void Reloaded(bool accepted);
  // Adds what the kernel says now. Without /proc some families are not there.
  void AddTo(std::vector<prometheus::MetricFamily>& families) const;

 private:
  const double started_;  // Unix time; 0: unknown
  prometheus::Gauge &reloaded_, &reloaded_at_;
};

}  // namespace ashlar::daemon
