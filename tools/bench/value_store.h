// SPDX-License-Identifier: Apache-2.0
// ValueStore: the stores that `ashlar-bench store` measures, each a process of its own that keeps values for this one.
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

// The amounts that the bench uses of a store at once.
struct StoreSizes {
  uint64_t ring_bytes = 0;   // the latest values of this size together are never lost
  uint64_t batch_bytes = 0;  // the largest batch
};

class ValueStore {
 public:
  virtual ~ValueStore() = default;
  // Stores values that lie one behind the other in the caller's memory.
  virtual absl::Status Put(const Batch& batch, const std::byte* values) = 0;
  // Copies the values out into targets(), from `offset` on, one behind the other. An error where one is not there.
  virtual absl::Status Get(const Batch& batch, uint64_t offset) = 0;
  // The caller's memory that values are copied out into, of ring_bytes: shared memory, touched.
  virtual std::span<const std::byte> targets() const = 0;
  virtual pid_t server() const = 0;
};

// One private ashlard by two ways, in one session and the same memory: each finds the other's values. A value is a
// segment of one attention layer; a batch of gets is one call. By the calls of client/session a batch of puts is one
// reservation, a copy into memory that is shared with the daemon, and one publish; by ashlar/engine.h (Begin, Publish,
// Finish) a look-up stands before these.
struct AshlarStores {
  std::unique_ptr<ValueStore> by_client, by_engine;
};
absl::StatusOr<AshlarStores> OpenAshlarStores(const StoreSizes& sizes, int threads);

// A private redis-server on a Unix socket that writes nothing to disk; the commands of a batch are pipelined, and
// replies are copied out. A new value takes the place of the one that is a ring older. UNIMPLEMENTED: built without
// hiredis; NOT_FOUND: there is no redis-server.
absl::StatusOr<std::unique_ptr<ValueStore>> OpenRedisStore(const StoreSizes& sizes);

}  // namespace ashlar::bench
