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

uint64_t Level::IdleOfOther(const TenantPool& pool) const {
  const Share& other = ShareOf(OtherPool(pool));
  return std::min(other.idle, Above(other.used, other.floor));
}

std::vector<RankedObject*> Level::Victims(const TenantPool& pool, uint64_t extents, EvictionPolicy::Purpose purpose) {
  const uint64_t own = ShareOf(pool).idle, of_other = IdleOfOther(pool);
  if (extents > own + of_other) return {};
  const EvictionPolicy::Allowance from[] = {{pool, own}, {OtherPool(pool), of_other}};
  return policy_.Victims(from, extents, purpose);
}

std::vector<Entry*> Level::NextVictims(const TenantPool& pool, uint64_t extents) {
  const uint64_t free = FreeExtents(pool), idle = ShareOf(pool).idle + IdleOfOther(pool);
  if (extents <= free) return {};
  std::vector<Entry*> entries;
  for (RankedObject* victim : Victims(pool, std::min(extents - free, idle), EvictionPolicy::Purpose::kInspect)) {
    entries.push_back(static_cast<Entry*>(victim));  // Track adds only entries
  }
  return entries;
}

std::optional<Slot> Level::Allocate(const TenantPool& pool, uint64_t extents, absl::FunctionRef<void(ObjectId)> evict) {
  while (true) {
    const uint64_t free = FreeExtents(pool);
    if (extents <= free) {
      absl::StatusOr<Slot> slot = tier_.Allocate(pool.tenant, extents);
      if (slot.ok()) {
        shares_[pool].used += extents;
        return *std::move(slot);
      }
      if (!absl::IsResourceExhausted(slot.status())) return std::nullopt;
      // Within budget but refused: the machine has no memory for another arena, so copies must be evicted.
      observer_.NoMemory(pool.tenant, slot.status().message());
    }
    // Copies that were evicted before may still be on the disk, which frees their extents once the deletion is durable.
    const uint64_t missing = extents > free ? extents - free : 1, freeing = FreeingExtents(pool.tenant);
    if (missing <= freeing) return std::nullopt;
    // By id, because evicting one victim may end others of the list.
    std::vector<ObjectId> victims;
    for (const RankedObject* victim : Victims(pool, missing - freeing)) victims.push_back(victim->id);
    if (victims.empty()) return std::nullopt;
    for (const ObjectId victim : victims) evict(victim);
    if (FreeExtents(pool) <= free) return std::nullopt;
  }
}

uint64_t Level::FreeingExtents(TenantId tenant) const {
  uint64_t used = 0;
  for (const PoolKind pool : kPools) used += ShareOf({tenant, pool}).used;
  return Above(tier_.Usage(tenant).used_bytes / limits::kExtentBytes, used);
}

Entry* Level::NextVictim(const TenantPool& pool) {
  const std::vector<RankedObject*> victims = Victims(pool, 1);
  return victims.empty() ? nullptr : static_cast<Entry*>(victims.front());  // Track adds only entries
}

bool Level::HasSpaceFor(const RankedObject& object, uint64_t extents, bool evicting) {
  const uint64_t free = FreeExtents(object.pool);
  if (extents <= free) return true;
  const std::vector<RankedObject*> victims =
      evicting ? Victims(object.pool, extents - free) : std::vector<RankedObject*>();
  return !victims.empty() && policy_.IsDearer(object, victims);
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
