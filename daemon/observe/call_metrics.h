// SPDX-License-Identifier: Apache-2.0
// CallMetrics: Prometheus metrics of engines' calls and connections. Thread-safe.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>

#include "absl/status/status.h"
#include "proto/cache_calls.h"

namespace ashlar::daemon {

// 10 µs to 10 s. A lookup takes tens of microseconds, the landing of a long prompt a large part of a second.
inline const prometheus::Histogram::BucketBoundaries kCallSeconds = {1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2,
                                                                     3e-2, 0.1,  0.3,  1,    3,    10};

class CallMetrics {
 public:
  explicit CallMetrics(prometheus::Registry& registry);
  void Finished(CacheCall call, absl::StatusCode code, double seconds);
  // `seconds` ends with the reply of the lookup, even for LookupAndLand, whose landing continues.
  void LookedUp(double seconds) { lookup_seconds_.Observe(seconds); }

 private:
  prometheus::Family<prometheus::Counter>& finished_;
  prometheus::Histogram& lookup_seconds_;
  std::array<prometheus::Histogram*, kCacheCalls.size()> seconds_{};  // one per call
};

}  // namespace ashlar::daemon
