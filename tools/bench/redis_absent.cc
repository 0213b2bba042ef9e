// SPDX-License-Identifier: Apache-2.0
// Replaces redis_store.cc where hiredis was not found.
#include "tools/bench/value_store.h"

namespace ashlar::bench {

absl::StatusOr<std::unique_ptr<ValueStore>> OpenRedisStore(const StoreSizes&) {
  return absl::UnimplementedError("--compare redis: built without hiredis (Debian: libhiredis-dev, redis-tools)");
}

}  // namespace ashlar::bench
