// SPDX-License-Identifier: Apache-2.0
// ColdSegment: a segment that an engine misses, and that another engine may compute.
#pragma once

#include <cstdint>

#include "daemon/router/prefill_workers.h"
#include "proto/object.h"

namespace ashlar::daemon {

// `shard` and `bytes` are those of the stored object (0: unknown).
struct ColdSegment {
  PrefillWork work;
  TensorShard shard;
  uint64_t bytes = 0;
};

}  // namespace ashlar::daemon
