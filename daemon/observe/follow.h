// SPDX-License-Identifier: Apache-2.0
// Follow: sets a Prometheus counter to a count that is kept elsewhere.
#pragma once

#include <prometheus/counter.h>

#include <cstdint>

namespace ashlar::daemon {

// `count` never decreases. Nothing else may increment the counter.
inline void Follow(prometheus::Counter& counter, uint64_t count) {
  counter.Increment(static_cast<double>(count) - counter.Value());
}

}  // namespace ashlar::daemon
