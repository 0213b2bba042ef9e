// SPDX-License-Identifier: Apache-2.0
// Tier: a place with a capacity that holds objects in slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/gpu.h"
#include "proto/outcome.h"
#include "storage/ids.h"

namespace ashlar::storage {

// Consecutive extents of one arena.
struct ExtentRun {
  uint32_t arena = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  bool operator==(const ExtentRun&) const = default;
};

// An allocation: extents of one tenant, in the object's order. The holder owns it and must free it with Free.
struct Slot {
  TenantId tenant = 0;
  std::vector<ExtentRun> runs;
  uint64_t Extents() const;
  // Keeps the first `extents`, and returns the rest as another slot.
  Slot SplitAfter(uint64_t extents);
};

struct TierUsage {
  uint64_t capacity_bytes = 0;  // the tenant's budget, or the tier's capacity
  uint64_t used_bytes = 0;      // bytes in slots
  uint64_t held_bytes = 0;      // bytes in arenas, used or not; at most the capacity

  TierUsage& operator+=(const TierUsage& other) {
    capacity_bytes += other.capacity_bytes;
    used_bytes += other.used_bytes;
    held_bytes += other.held_bytes;
    return *this;
  }
};

// Not thread-safe except Address: the metadata thread owns every tier.
class Tier {
 public:
  virtual ~Tier() = default;
  virtual TierKind kind() const = 0;

  // RESOURCE_EXHAUSTED if the tenant's budget has no `extents` free extents: the caller must evict and retry.
  virtual absl::StatusOr<Slot> Allocate(TenantId tenant, uint64_t extents) = 0;
  virtual void Free(Slot slot) = 0;
  // Call before Allocate if the caller can wait. Returns true if the tier first gets memory from the system, on another
  // thread: then `call` follows, with false if the system has none. Ask again after true, because other callers may
  // have taken the memory. Returns false, without a call, if Allocate would not wait for the system.
  virtual bool WhenGrown(TenantId /*tenant*/, uint64_t /*extents*/, std::function<void(bool grown)> /*call*/) {
    return false;
  }
  virtual TierUsage Usage(TenantId tenant) const = 0;
  virtual TierUsage Usage() const = 0;

  // For memory tiers: the address of an extent in this process. Stable for the slot's life; callable from any thread.
  virtual std::byte* Address(uint32_t arena, uint32_t extent) const = 0;
  // For memory tiers: the GPU whose memory it is; its addresses are only for kernels and copies of that GPU. Null for
  // host memory.
  virtual const kernels::Gpu* gpu() const { return nullptr; }
};

}  // namespace ashlar::storage
