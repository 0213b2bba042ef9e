// SPDX-License-Identifier: Apache-2.0
// Follow: a Prometheus counter for a count that is kept elsewhere.
#pragma once

#include <prometheus/counter.h>

#include <cstdint>

namespace ashlar::daemon {

// `count` never falls. For a counter that nobody else increments.
inline void Follow(prometheus::Counter& counter, uint64_t count) {
  counter.Increment(static_cast<double>(count) - counter.Value());
}

}  // namespace ashlar::daemon
