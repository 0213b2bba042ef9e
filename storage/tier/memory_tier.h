// SPDX-License-Identifier: Apache-2.0
// MemoryTier: a memory tier in arenas of one tenant each: sealed shared memory, or GPU memory, which cannot be sealed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
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
  uint64_t capacity_bytes = 0;                        // limit of the sum of all budgets
  uint64_t arena_bytes = uint64_t{64} * 1024 * 1024;  // unit in which memory is assigned to a tenant; whole extents
  ArenaOptions arena;
  bool on_gpu = false;  // uses the memory of arena.gpu, which must be set; ignores the rest of `arena`
  // Number of its first arena. Tiers with mapped arenas are kArenasApart apart.
  uint32_t first_arena = 0;
};
inline constexpr uint32_t kArenasApart = uint32_t{1} << 20;

// Arenas are created when a tenant first needs them, or in advance (Prepare, CreateOn), and stay with the tenant. Bytes
// in arenas never exceed the tenant's budget, and so never the capacity: no other tenant can take a tenant's budget.
class MemoryTier final : public Tier {
 public:
  // INVALID_ARGUMENT names the field. FAILED_PRECONDITION if the machine does not provide such memory.
  static absl::StatusOr<std::unique_ptr<MemoryTier>> Make(const MemoryTierOptions& options);

  // Sets a tenant's budget, once, rounded down to whole extents. INVALID_ARGUMENT names the field if it holds no
  // extent, or the budgets exceed the capacity; ALREADY_EXISTS for a tenant with a budget.
  absl::Status AddTenant(TenantId tenant, uint64_t budget_bytes);

  // Changes a tenant's budget; the sum over tenants must not exceed the capacity. Check: FAILED_PRECONDITION if the
  // tenant's arenas, which are never freed, take more; INVALID_ARGUMENT below one extent; NOT_FOUND.
  absl::Status CheckBudget(TenantId tenant, uint64_t budget_bytes) const;
  void SetBudget(TenantId tenant, uint64_t budget_bytes);

  TierKind kind() const override { return options_.kind; }
  absl::StatusOr<Slot> Allocate(TenantId tenant, uint64_t extents) override;
  bool WhenGrown(TenantId tenant, uint64_t extents, std::function<void(bool grown)> call) override;
  void Free(Slot slot) override;
  TierUsage Usage(TenantId tenant) const override;  // all zero for an unknown tenant
  TierUsage Usage() const override;
  std::byte* Address(uint32_t arena, uint32_t extent) const override;
  const kernels::Gpu* gpu() const override { return options_.on_gpu ? options_.arena.gpu : nullptr; }

  // Call once. `made` is called for every arena, existing ones immediately, on the metadata thread. It is kept as long
  // as the tier.
  void OnArena(std::function<void(const kernels::ArenaMemory&)> made);

  // Starts an arena in advance, one at a time, if the tenant's arenas hold less than `wanted_bytes` and its budget has
  // space; otherwise returns null. Call Make on any thread, then Prepared. The bytes count as held from now on. For
  // tiers in host memory without GPU access.
  std::shared_ptr<ComingArena> Prepare(TenantId tenant, uint64_t wanted_bytes);
  // Adds the arena, unless an allocation has taken it. RESOURCE_EXHAUSTED if the machine has no memory for it.
  absl::Status Prepared(TenantId tenant, const std::shared_ptr<ComingArena>& arena);
  // Call once. Allocations then start arenas in advance, one ahead of the tenant's use, and WhenGrown waits for them.
  // `create` must call MakeAhead on another thread, then Prepared. It returns false if it cannot.
  using Create = std::function<bool(TenantId, const std::shared_ptr<ComingArena>&)>;
  void CreateOn(Create create) { create_ = std::move(create); }
  // Prepares an arena by that function. Returns whether it has started one.
  bool GrowTo(TenantId tenant, uint64_t wanted_bytes);

  struct ArenaDescriptor {
    int descriptor = -1;  // owned by the tier: send it, do not close it
    uint64_t bytes = 0;
  };
  // Returns the descriptor by which an engine of `tenant` maps an arena: read-only, except for a GPU. NOT_FOUND for an
  // arena of another tenant.
  absl::StatusOr<ArenaDescriptor> Descriptor(TenantId tenant, uint32_t arena) const;

 private:
  struct Tenant {
    uint64_t budget_bytes = 0;
    uint64_t held_bytes = 0;
    uint64_t used_bytes = 0;
    ExtentAllocator extents;
    std::shared_ptr<ComingArena> coming;  // null without one; its bytes are held
    uint64_t coming_bytes = 0;
    bool created_elsewhere = false;                  // from `create_` to Prepared
    std::vector<std::function<void(bool)>> waiting;  // until Prepared
  };
  struct OwnedArena {
    TenantId tenant;
    std::unique_ptr<kernels::ArenaMemory> memory;
  };

  MemoryTier(const MemoryTierOptions& options, size_t max_arenas);
  absl::Status AllArenasInUse() const;
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
  Create create_;                                          // may be empty
  // Addresses of the arenas, for readers on other threads while arenas are added; never reallocated.
  const std::unique_ptr<std::atomic<std::byte*>[]> addresses_;
};

}  // namespace ashlar::storage
