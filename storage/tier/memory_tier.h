// SPDX-License-Identifier: Apache-2.0
// MemoryTier: a memory tier in arenas of one tenant each: sealed shared memory, or a GPU's, which nothing can seal.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/memory/arena.h"
#include "storage/tier/coming_arena.h"
#include "storage/tier/extent_allocator.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

struct MemoryTierOptions {
  TierKind kind = TierKind::kDram;
  uint64_t capacity_bytes = 0;                        // budgets of all tenants together never exceed it
  uint64_t arena_bytes = uint64_t{64} * 1024 * 1024;  // the unit in which memory becomes a tenant's; whole extents
  ArenaOptions arena;
  bool on_gpu = false;  // in the memory of arena.gpu, which must be there; nothing else of `arena` counts then
  // The number of its first arena: tiers whose arenas engines map are apart by kArenasApart.
  uint32_t first_arena = 0;
};
inline constexpr uint32_t kArenasApart = uint32_t{1} << 20;

// Arenas are made when a tenant first needs them, or ahead of that (Prepare), and stay its own. Bytes in arenas never
// exceed the tenant's budget, hence never the tier's capacity: a budget is memory that no other tenant can take.
class MemoryTier final : public Tier {
 public:
  // INVALID_ARGUMENT naming the field; FAILED_PRECONDITION if this machine does not grant such memory.
  static absl::StatusOr<std::unique_ptr<MemoryTier>> Make(const MemoryTierOptions& options);

  // Gives a tenant a budget, once. It counts in whole extents, rounded down. INVALID_ARGUMENT naming the field when it
  // holds no extent or the budgets together exceed the capacity; ALREADY_EXISTS for a tenant that has one.
  absl::Status AddTenant(TenantId tenant, uint64_t budget_bytes);

  // Gives a tenant another budget; the sum over tenants must fit the capacity. Check: FAILED_PRECONDITION where the
  // tenant's arenas, which are never given back, take more; INVALID_ARGUMENT below one extent; NOT_FOUND.
  absl::Status CheckBudget(TenantId tenant, uint64_t budget_bytes) const;
  void SetBudget(TenantId tenant, uint64_t budget_bytes);

  TierKind kind() const override { return options_.kind; }
  absl::StatusOr<Slot> Allocate(TenantId tenant, uint64_t extents) override;
  void Free(Slot slot) override;
  TierUsage Usage(TenantId tenant) const override;  // all zero for an unknown tenant
  TierUsage Usage() const override;
  std::byte* Address(uint32_t arena, uint32_t extent) const override;
  const kernels::Gpu* gpu() const override { return options_.on_gpu ? options_.arena.gpu : nullptr; }

  // Once: `made` is told of every arena, of those that there are at once, on the metadata thread. It stays for as long
  // as the tier.
  void OnArena(std::function<void(const kernels::ArenaMemory&)> made);

  // Begins an arena ahead of need, one at a time, if the tenant's arenas hold less than `wanted_bytes` and its budget
  // has room for more; null: nothing is to be made. Call Make on any thread, then Prepared. The bytes count as held
  // from now on. Of a tier in the processor's memory that no GPU reaches.
  std::shared_ptr<ComingArena> Prepare(TenantId tenant, uint64_t wanted_bytes);
  // Takes the arena, unless an allocation was faster. RESOURCE_EXHAUSTED: the machine has no memory for it.
  absl::Status Prepared(TenantId tenant, const std::shared_ptr<ComingArena>& arena);

  struct ArenaDescriptor {
    int descriptor = -1;  // the tier's: send it, never close it
    uint64_t bytes = 0;
  };
  // Returns the descriptor by which an engine of `tenant` maps an arena: read-only, except a GPU's. NOT_FOUND for
  // another tenant's.
  absl::StatusOr<ArenaDescriptor> Descriptor(TenantId tenant, uint32_t arena) const;

 private:
  struct Tenant {
    uint64_t budget_bytes = 0;
    uint64_t held_bytes = 0;
    uint64_t used_bytes = 0;
    ExtentAllocator extents;
    std::shared_ptr<ComingArena> coming;  // null: none; its bytes are held
    uint64_t coming_bytes = 0;
  };
  struct OwnedArena {
    TenantId tenant;
    std::unique_ptr<kernels::ArenaMemory> memory;
  };

  MemoryTier(const MemoryTierOptions& options, size_t max_arenas);
  absl::Status Grow(TenantId id, Tenant& tenant);
  absl::Status TakeComing(TenantId id, Tenant& tenant);
  uint64_t NextArenaBytes(const Tenant& tenant) const;
  void Add(TenantId id, Tenant& tenant, std::unique_ptr<kernels::ArenaMemory> arena);

  const MemoryTierOptions options_;
  std::map<TenantId, Tenant> tenants_;
  uint64_t budgets_bytes_ = 0;
  const size_t max_arenas_;
  std::vector<OwnedArena> arenas_;
  std::function<void(const kernels::ArenaMemory&)> made_;  // may be empty
  // The arenas' addresses, for readers on other threads while arenas are added: never reallocated.
  const std::unique_ptr<std::atomic<std::byte*>[]> addresses_;
};

}  // namespace ashlar::storage
