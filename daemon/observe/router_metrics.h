// SPDX-License-Identifier: Apache-2.0
// RouterMetrics: Prometheus metrics of prefill by other engines.
#pragma once

#include <prometheus/registry.h>

#include <cstdint>
#include <memory>

namespace ashlar::daemon {

// A snapshot. Counters start at 0 when the daemon starts.
struct RouterFigures {
  uint64_t workers = 0;  // engines on this node that offer prefill
  uint64_t given = 0;    // segments assigned to these engines and not finished
  uint64_t plans = 0;    // open plans of engines on this node
  uint64_t pending = 0;  // segments that other engines compute for these plans
  uint64_t planned = 0, alone = 0;
  uint64_t own_segments = 0, here_segments = 0, elsewhere_segments = 0;
  uint64_t arrived = 0, failed = 0, late = 0;
  uint64_t given_back = 0;
};

class RouterMetrics {
 public:
  explicit RouterMetrics(prometheus::Registry& registry);
  ~RouterMetrics();
  void Set(const RouterFigures& figures);  // call on one thread

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
