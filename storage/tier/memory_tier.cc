// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/memory_tier.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"
#include "storage/memory/memory_lock.h"

namespace ashlar::storage {
namespace {

using limits::kExtentBytes;
constexpr size_t kMaxTenants = 4096;
constexpr uint64_t kMaxArenas = kArenasApart;

absl::StatusOr<std::unique_ptr<kernels::ArenaMemory>> MakeArena(uint64_t bytes, const MemoryTierOptions& options) {
  if (!options.on_gpu) {
    absl::StatusOr<Arena> arena = Arena::Make(bytes, options.arena);
    if (!arena.ok()) return arena.status();
    return std::make_unique<Arena>(*std::move(arena));
  }
  kernels::ArenaError error;
  std::unique_ptr<kernels::ArenaMemory> arena = options.arena.gpu->MakeArena(bytes, &error);
  if (arena == nullptr) return absl::ResourceExhaustedError(absl::StrCat("arena: ", error.message));
  return arena;
}

// Checks at startup, before the first engine, whether the machine grants such memory.
absl::Status CheckMachine(const MemoryTierOptions& options) {
  const auto named = [&](absl::string_view field, const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(Name(options.kind), field, status.message()));
  };
  if (options.on_gpu) return MakeArena(kExtentBytes, options).status();
  const ArenaOptions& arena = options.arena;
  if (absl::Status nodes = CheckNodes(arena.numa); !nodes.ok()) return named(".numa.", nodes);
  if (arena.lock) {
    if (absl::Status lock = AllowLocking(options.capacity_bytes); !lock.ok()) return named(".lock: ", lock);
  }
  ArenaOptions plain = arena;
  plain.huge_pages = false;
  return Arena::Make(kExtentBytes, plain).status();
}

}  // namespace

uint64_t Slot::Extents() const {
  uint64_t extents = 0;
  for (const ExtentRun& run : runs) extents += run.count;
  return extents;
}

Slot Slot::SplitAfter(uint64_t extents) {
  Slot rest{.tenant = tenant};
  std::vector<ExtentRun> kept;
  for (const ExtentRun& run : runs) {
    const auto keep = static_cast<uint32_t>(std::min<uint64_t>(run.count, extents));
    extents -= keep;
    if (keep > 0) kept.push_back({run.arena, run.first, keep});
    if (keep < run.count) rest.runs.push_back({run.arena, run.first + keep, run.count - keep});
  }
  runs = std::move(kept);
  return rest;
}

absl::StatusOr<std::unique_ptr<MemoryTier>> MemoryTier::Make(const MemoryTierOptions& options) {
  if (options.capacity_bytes < kExtentBytes) {
    return absl::InvalidArgumentError(absl::StrCat(Name(options.kind), ".capacity_bytes: ", options.capacity_bytes,
                                                   "; expected at least one extent, ", kExtentBytes, " bytes"));
  }
  if (options.arena_bytes == 0 || options.arena_bytes % kExtentBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(Name(options.kind), ".arena_bytes: ", options.arena_bytes,
                                                   "; expected a multiple of ", kExtentBytes));
  }
  if (options.arena_bytes / kExtentBytes > UINT32_MAX) {
    return absl::InvalidArgumentError(absl::StrCat(Name(options.kind), ".arena_bytes: ", options.arena_bytes,
                                                   "; expected at most ", UINT32_MAX * kExtentBytes));
  }
  // All arenas of a tenant have the full size, except the last one.
  const uint64_t max_arenas = options.capacity_bytes / options.arena_bytes + kMaxTenants;
  if (max_arenas > kMaxArenas) {
    const uint64_t least = options.capacity_bytes / (kMaxArenas - kMaxTenants + 1) / kExtentBytes * kExtentBytes;
    return absl::InvalidArgumentError(absl::StrCat(Name(options.kind), ".arena_bytes: ", options.arena_bytes,
                                                   "; expected at least ", least + kExtentBytes, ", for at most ",
                                                   kMaxArenas, " arenas"));
  }
  if (absl::Status able = CheckMachine(options); !able.ok()) return able;
  return std::unique_ptr<MemoryTier>(new MemoryTier(options, max_arenas));
}

MemoryTier::MemoryTier(const MemoryTierOptions& options, size_t max_arenas)
    : options_(options), max_arenas_(max_arenas), addresses_(new std::atomic<std::byte*>[max_arenas]()) {}

absl::Status MemoryTier::AddTenant(TenantId tenant, uint64_t budget_bytes) {
  if (tenants_.contains(tenant))
    return absl::AlreadyExistsError(absl::StrCat("tenant ", tenant, ": already has a budget"));
  if (tenants_.size() == kMaxTenants)
    return absl::InvalidArgumentError(absl::StrCat("tenants: too many; expected at most ", kMaxTenants));
  if (budget_bytes < kExtentBytes) {
    return absl::InvalidArgumentError(absl::StrCat(Name(options_.kind), "_bytes: ", budget_bytes,
                                                   "; expected at least one extent, ", kExtentBytes, " bytes"));
  }
  if (budget_bytes > options_.capacity_bytes - budgets_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(options_.kind), "_bytes: ", budget_bytes, " is too large; expected at most ",
                     options_.capacity_bytes - budgets_bytes_, ", the part of ", Name(options_.kind),
                     ".capacity_bytes that is not assigned to other tenants"));
  }
  budget_bytes = budget_bytes / kExtentBytes * kExtentBytes;
  tenants_[tenant].budget_bytes = budget_bytes;
  budgets_bytes_ += budget_bytes;
  return absl::OkStatus();
}

absl::Status MemoryTier::CheckBudget(TenantId tenant, uint64_t budget_bytes) const {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return absl::NotFoundError(absl::StrCat("tenant ", tenant, ": has no budget"));
  if (budget_bytes < kExtentBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(budget_bytes, "; expected at least one extent, ", kExtentBytes, " bytes"));
  }
  if (budget_bytes / kExtentBytes * kExtentBytes < found->second.held_bytes) {
    return absl::FailedPreconditionError(
        absl::StrCat(budget_bytes, "; expected at least ", found->second.held_bytes,
                     " bytes, the size of the tenant's arenas, which are freed only when the daemon restarts"));
  }
  return absl::OkStatus();
}

void MemoryTier::SetBudget(TenantId tenant, uint64_t budget_bytes) {
  uint64_t& budget = tenants_.at(tenant).budget_bytes;
  budgets_bytes_ -= budget;
  budget = budget_bytes / kExtentBytes * kExtentBytes;
  budgets_bytes_ += budget;
}

absl::StatusOr<Slot> MemoryTier::Allocate(TenantId tenant, uint64_t extents) {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return absl::ResourceExhaustedError(absl::StrCat("tenant ", tenant, ": has no budget"));
  Tenant& owner = found->second;
  if (extents > (owner.budget_bytes - owner.used_bytes) / kExtentBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("tenant ", tenant, ": budget is used up"));
  }
  // Touched memory is reused before new arenas are created.
  while (owner.extents.free_extents() < extents) {
    if (absl::Status grown = Grow(tenant, owner); !grown.ok()) return grown;
  }
  owner.used_bytes += extents * kExtentBytes;
  GrowTo(tenant, owner.used_bytes + options_.arena_bytes);
  return Slot{.tenant = tenant, .runs = owner.extents.Take(extents)};
}

bool MemoryTier::GrowTo(TenantId tenant, uint64_t wanted_bytes) {
  const auto found = tenants_.find(tenant);
  if (!create_ || found == tenants_.end() || found->second.created_elsewhere) return false;
  const auto arena = Prepare(tenant, wanted_bytes);
  if (arena == nullptr) return false;
  Tenant& owner = found->second;
  owner.created_elsewhere = create_(tenant, arena);
  if (!owner.created_elsewhere) {
    owner.coming = nullptr;
    owner.held_bytes -= owner.coming_bytes;
  }
  return owner.created_elsewhere;
}

bool MemoryTier::WhenGrown(TenantId tenant, uint64_t extents, std::function<void(bool grown)> call) {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return false;
  Tenant& owner = found->second;
  if (owner.extents.free_extents() >= extents || extents > owner.budget_bytes / kExtentBytes) return false;
  if (!owner.created_elsewhere && !GrowTo(tenant, owner.held_bytes + 1)) return false;
  owner.waiting.push_back(std::move(call));
  return true;
}

// After the budget was raised, the last arena may be smaller.
uint64_t MemoryTier::NextArenaBytes(const Tenant& tenant) const {
  return std::min(options_.arena_bytes, tenant.budget_bytes - tenant.held_bytes);
}

absl::Status MemoryTier::AllArenasInUse() const {
  return absl::ResourceExhaustedError(absl::StrCat(Name(options_.kind), ": all ", max_arenas_,
                                                   " arenas are in use; increase ", Name(options_.kind),
                                                   ".arena_bytes"));
}

absl::Status MemoryTier::Grow(TenantId id, Tenant& tenant) {
  if (tenant.coming != nullptr) return TakeComing(id, tenant);
  if (arenas_.size() == max_arenas_) return AllArenasInUse();
  const uint64_t bytes = NextArenaBytes(tenant);
  auto arena = MakeArena(bytes, options_);
  if (!arena.ok()) return arena.status();
  tenant.held_bytes += bytes;
  Add(id, tenant, *std::move(arena));
  return absl::OkStatus();
}

void MemoryTier::Add(TenantId id, Tenant& tenant, std::unique_ptr<kernels::ArenaMemory> arena) {
  const auto index = static_cast<uint32_t>(arenas_.size());
  addresses_[index].store(arena->data(), std::memory_order_release);
  tenant.extents.AddArena(options_.first_arena + index, static_cast<uint32_t>(arena->bytes() / kExtentBytes));
  arenas_.push_back({id, std::move(arena)});
  if (made_) made_(*arenas_.back().memory);
}

std::shared_ptr<ComingArena> MemoryTier::Prepare(TenantId tenant, uint64_t wanted_bytes) {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end() || options_.arena.gpu != nullptr) return nullptr;
  Tenant& owner = found->second;
  const uint64_t bytes = NextArenaBytes(owner);
  if (owner.coming != nullptr || bytes == 0 || owner.held_bytes >= wanted_bytes) return nullptr;
  if (arenas_.size() == max_arenas_) return nullptr;
  owner.held_bytes += bytes;
  owner.coming_bytes = bytes;
  owner.coming = std::make_shared<ComingArena>([bytes, options = options_] { return MakeArena(bytes, options); });
  return owner.coming;
}

absl::Status MemoryTier::Prepared(TenantId tenant, const std::shared_ptr<ComingArena>& arena) {
  Tenant& owner = tenants_.at(tenant);
  absl::Status taken = owner.coming == arena ? TakeComing(tenant, owner) : absl::OkStatus();
  owner.created_elsewhere = false;
  for (const auto& call : std::exchange(owner.waiting, {})) call(taken.ok());
  return taken;
}

absl::Status MemoryTier::TakeComing(TenantId id, Tenant& tenant) {
  ComingArena::Made arena = std::exchange(tenant.coming, nullptr)->Take();
  if (arena.ok() && arenas_.size() == max_arenas_) {
    arena = AllArenasInUse();
  }
  if (!arena.ok()) {
    tenant.held_bytes -= tenant.coming_bytes;
    return arena.status();
  }
  Add(id, tenant, *std::move(arena));
  return absl::OkStatus();
}

void MemoryTier::Free(Slot slot) {
  Tenant& owner = tenants_.at(slot.tenant);
  for (const ExtentRun& run : slot.runs) owner.extents.Give(run);
  owner.used_bytes -= slot.Extents() * kExtentBytes;
}

TierUsage MemoryTier::Usage(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return {};
  return {found->second.budget_bytes, found->second.used_bytes, found->second.held_bytes};
}

TierUsage MemoryTier::Usage() const {
  TierUsage usage{.capacity_bytes = options_.capacity_bytes};
  for (const auto& [id, tenant] : tenants_) {
    usage.used_bytes += tenant.used_bytes;
    usage.held_bytes += tenant.held_bytes;
  }
  return usage;
}

std::byte* MemoryTier::Address(uint32_t arena, uint32_t extent) const {
  return addresses_[arena - options_.first_arena].load(std::memory_order_acquire) + uint64_t{extent} * kExtentBytes;
}

void MemoryTier::OnArena(std::function<void(const kernels::ArenaMemory&)> made) {
  made_ = std::move(made);
  for (const OwnedArena& arena : arenas_) made_(*arena.memory);
}

absl::StatusOr<MemoryTier::ArenaDescriptor> MemoryTier::Descriptor(TenantId tenant, uint32_t arena) const {
  const uint32_t index = arena - options_.first_arena;  // wraps to a very large number for an arena before the first
  if (index >= arenas_.size() || arenas_[index].tenant != tenant) {
    return absl::NotFoundError(absl::StrCat("arena ", arena, ": unknown"));
  }
  const kernels::ArenaMemory& memory = *arenas_[index].memory;
  return ArenaDescriptor{memory.descriptor(), memory.bytes()};
}

}  // namespace ashlar::storage
