// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/level.h"

#include <algorithm>
#include <utility>

#include "proto/limits.h"

namespace ashlar::storage {
namespace {

TenantPool OtherPool(const TenantPool& pool) {
  return {pool.tenant, pool.kind == PoolKind::kPublic ? PoolKind::kPrivate : PoolKind::kPublic};
}

uint64_t Above(uint64_t a, uint64_t b) {
  return a > b ? a - b : 0;
}

}  // namespace

void Level::SetFloor(const TenantPool& pool, uint64_t bytes) {
  shares_[pool].floor = bytes / limits::kExtentBytes;
}

const Level::Share& Level::ShareOf(const TenantPool& pool) const {
  static constexpr Share kNothing;
  const auto found = shares_.find(pool);
  return found == shares_.end() ? kNothing : found->second;
}

uint64_t Level::FreeExtents(const TenantPool& pool) const {
  const TierUsage usage = tier_.Usage(pool.tenant);
  const Share& other = ShareOf(OtherPool(pool));
  return Above((usage.capacity_bytes - usage.used_bytes) / limits::kExtentBytes, Above(other.floor, other.used));
}

void Level::Track(Entry& entry, Rank& copy) {
  copy.object = &entry;
  copy.extents = static_cast<uint32_t>(entry.header.Extents());
  policy_.Track(entry.pool, copy);
}

void Level::SetIdle(const TenantPool& pool, Rank& copy, bool idle) {
  if (copy.idle == idle) return;
  copy.idle = idle;
  uint64_t& all = shares_[pool].idle;
  all = idle ? all + copy.extents : all - copy.extents;
}

std::vector<RankedObject*> Level::Victims(const TenantPool& pool, uint64_t extents) {
  const Share &own = ShareOf(pool), &other = ShareOf(OtherPool(pool));
  const uint64_t of_other = std::min(other.idle, Above(other.used, other.floor));
  if (extents > own.idle + of_other) return {};
  const EvictionPolicy::Allowance from[] = {{pool, own.idle}, {OtherPool(pool), of_other}};
  return policy_.Victims(from, extents);
}

std::optional<Slot> Level::MakeRoom(const TenantPool& pool, uint64_t extents,
                                    absl::FunctionRef<void(ObjectId)> give_up) {
  while (true) {
    const uint64_t free = FreeExtents(pool);
    if (extents <= free) {
      absl::StatusOr<Slot> slot = tier_.Allocate(pool.tenant, extents);
      if (slot.ok()) {
        shares_[pool].used += extents;
        return *std::move(slot);
      }
      if (!absl::IsResourceExhausted(slot.status())) return std::nullopt;
      // Refused within the budget: the machine has no memory for another arena, so existing memory must be freed.
      observer_.NoMemory(pool.tenant, slot.status().message());
    }
    // Copies given up before may still be on the disk, which frees their extents when the deletion is durable.
    const uint64_t missing = extents > free ? extents - free : 1, coming = ComingExtents(pool.tenant);
    if (missing <= coming) return std::nullopt;
    // Stored by ID, because giving up one victim may end others of the list.
    std::vector<ObjectId> victims;
    for (const RankedObject* victim : Victims(pool, missing - coming)) victims.push_back(victim->id);
    if (victims.empty()) return std::nullopt;
    for (const ObjectId victim : victims) give_up(victim);
    if (FreeExtents(pool) <= free) return std::nullopt;
  }
}

uint64_t Level::ComingExtents(TenantId tenant) const {
  uint64_t used = 0;
  for (const PoolKind pool : kPools) used += ShareOf({tenant, pool}).used;
  return Above(tier_.Usage(tenant).used_bytes / limits::kExtentBytes, used);
}

Entry* Level::NextVictim(const TenantPool& pool) {
  const std::vector<RankedObject*> victims = Victims(pool, 1);
  return victims.empty() ? nullptr : static_cast<Entry*>(victims.front());  // the policy only has entries from Track
}

bool Level::HasRoomFor(const RankedObject& coming, uint64_t extents, bool evicting) {
  const uint64_t free = FreeExtents(coming.pool);
  if (extents <= free) return true;
  const std::vector<RankedObject*> victims =
      evicting ? Victims(coming.pool, extents - free) : std::vector<RankedObject*>();
  return !victims.empty() && policy_.IsDearer(coming, victims);
}

void Level::Free(const TenantPool& pool, Slot slot) {
  Freed(pool, slot.Extents());
  tier_.Free(std::move(slot));
}

void Level::AddTo(PoolShares& shares) const {
  for (const auto& [pool, share] : shares_) {
    PoolShare& sum = shares[{kind(), pool}];
    sum.used_bytes += share.used * limits::kExtentBytes;
    sum.floor_bytes += share.floor * limits::kExtentBytes;
  }
}

void Level::Freed(const TenantPool& pool, uint64_t extents) {
  shares_[pool].used -= extents;
}

}  // namespace ashlar::storage
