// SPDX-License-Identifier: Apache-2.0
// ValueStore: the stores that `ashlar-bench store` measures, each in a separate process.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ashlar::bench {

// Values of one size, named by consecutive numbers.
struct Batch {
  uint64_t first = 1;  // at least 1
  size_t count = 0;
  uint64_t value_bytes = 0;  // a multiple of kValueGrain
  uint64_t bytes() const { return count * value_bytes; }
};
inline constexpr uint64_t kValueGrain = 32 * 1024;

// The largest amounts that the bench uses of a store at once.
struct StoreSizes {
  uint64_t ring_bytes = 0;   // the latest values whose total is this size are never lost
  uint64_t batch_bytes = 0;  // the largest batch
};

class ValueStore {
 public:
  virtual ~ValueStore() = default;
  // Stores values that are consecutive in the caller's memory.
  virtual absl::Status Put(const Batch& batch, const std::byte* values) = 0;
  // Copies the values consecutively to targets(), starting at `offset`. An error if one is missing.
  virtual absl::Status Get(const Batch& batch, uint64_t offset) = 0;
  // The caller's memory into which values are copied, of ring_bytes: shared memory, touched.
  virtual std::span<const std::byte> targets() const = 0;
  virtual pid_t server() const = 0;
};

// A private ashlard, used through ashlar/engine.h (Begin, Publish, Finish). A value is a segment of one attention
// layer. A batch of puts is one prompt: a reservation, a copy into memory that is shared with the daemon, and one
// publish. A batch of gets is one prompt whose segments land in `targets`.
absl::StatusOr<std::unique_ptr<ValueStore>> OpenAshlarStore(const StoreSizes& sizes, int threads);

// A private redis-server on a Unix socket that writes nothing to disk; the commands of a batch are pipelined, and
// replies are copied out. A new value replaces the one that is a ring older. UNIMPLEMENTED: built without hiredis;
// NOT_FOUND: there is no redis-server.
absl::StatusOr<std::unique_ptr<ValueStore>> OpenRedisStore(const StoreSizes& sizes);

}  // namespace ashlar::bench
