// SPDX-License-Identifier: Apache-2.0
// Level: one tier as a place for copies. Counts the extents of each pool of each tenant, and chooses victims when space
// is needed.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "storage/objects/entry.h"
#include "storage/observer.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// A pool's share of a tier.
struct PoolShare {
  uint64_t used_bytes = 0;
  uint64_t floor_bytes = 0;  // reserved for this pool
};
// Pools with bytes or a floor in a tier. Tiers of all GPUs are summed.
using PoolShares = std::map<std::pair<TierKind, TenantPool>, PoolShare>;

// A tenant's use of a tier is the sum of its two pools. The bytes up to a pool's floor are reserved for it: the other
// pool neither evicts nor fills them. Above the floors the pools compete.
class Level {
 public:
  Level(Tier& tier, EvictionPolicy& policy, Observer& observer) : tier_(tier), policy_(policy), observer_(observer) {}

  // Call before the first allocation. The floors of a tenant's pools together must not exceed its budget.
  void SetFloor(const TenantPool& pool, uint64_t bytes);

  // Allocates for the pool, and evicts idle copies if necessary: copies of this pool, or those of other pools above
  // their floors. `give_up` is called for each such copy and must free it, immediately or (on a disk) soon; an object
  // may end before its call. If all evictable copies together are not enough, none is evicted. Returns nothing if there
  // is no room, or not yet.
  std::optional<Slot> MakeRoom(const TenantPool& pool, uint64_t extents, absl::FunctionRef<void(ObjectId)> give_up);
  // Full: MakeRoom would have to evict for so many extents. NextVictim: the first copy that it would evict.
  bool Full(const TenantPool& pool, uint64_t extents) const { return extents > FreeExtents(pool); }
  Entry* NextVictim(const TenantPool& pool);  // null if there is none
  // Returns whether there is room for a new object: free extents, or with `evicting` those of copies that are each
  // worth less.
  bool HasRoomFor(const RankedObject& coming, uint64_t extents, bool evicting);
  // Returns whether extents were given up and are not free yet.
  bool Coming(const TenantPool& pool) const { return ComingExtents(pool.tenant) > 0; }

  // Frees a slot from MakeRoom, whole or in part.
  void Free(const TenantPool& pool, Slot slot);
  void Freed(const TenantPool& pool, uint64_t extents);
  // Counts an existing slot, found after a restart.
  void Adopt(const TenantPool& pool, uint64_t extents) { shares_[pool].used += extents; }

  // The entry's copy here is whole: it is ranked until it is erased and may be evicted while it is idle.
  void Track(Entry& entry, Rank& copy);
  void Touch(Rank& copy) { policy_.Touch(copy); }
  void SetIdle(const TenantPool& pool, Rank& copy, bool idle);
  void Erase(Rank& copy) { policy_.Erase(copy); }  // call when the copy is no longer idle

  void AddTo(PoolShares& shares) const;
  TierKind kind() const { return tier_.kind(); }
  PolicyKind policy() const { return policy_.kind(); }
  Tier& tier() const { return tier_; }

 private:
  struct Share {
    uint64_t floor = 0, used = 0, idle = 0;  // all in extents
  };
  const Share& ShareOf(const TenantPool& pool) const;
  uint64_t FreeExtents(const TenantPool& pool) const;  // extents that the pool may take without eviction
  uint64_t ComingExtents(TenantId tenant) const;       // given up but not free yet
  // Returns idle copies with so many extents together; nothing if there are not enough.
  std::vector<RankedObject*> Victims(const TenantPool& pool, uint64_t extents);

  Tier& tier_;
  EvictionPolicy& policy_;
  Observer& observer_;
  std::map<TenantPool, Share> shares_;
};

}  // namespace ashlar::storage
