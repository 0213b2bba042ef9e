// SPDX-License-Identifier: Apache-2.0
// RouterMetrics: prefill by other engines, for Prometheus.
#pragma once

#include <prometheus/registry.h>

#include <cstdint>
#include <memory>

namespace ashlar::daemon {

// At one moment. Counts are since the daemon started.
struct RouterFigures {
  uint64_t workers = 0;  // engines of this node that offer prefill
  uint64_t given = 0;    // segments that these have and have not done
  uint64_t plans = 0;    // open, of engines of this node
  uint64_t pending = 0;  // segments that others compute for them
  uint64_t planned = 0, alone = 0;
  uint64_t own_segments = 0, here_segments = 0, elsewhere_segments = 0;
  uint64_t arrived = 0, failed = 0, late = 0;
  uint64_t given_back = 0;
};

class RouterMetrics {
 public:
  explicit RouterMetrics(prometheus::Registry& registry);
  ~RouterMetrics();
  void Set(const RouterFigures& figures);  // one thread

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
