// SPDX-License-Identifier: Apache-2.0
// Level: one tier as a place for copies. It counts how much each pool of each tenant uses, and chooses the victims when
// space is needed.
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

// The part of a tier that a pool has.
struct PoolShare {
  uint64_t used_bytes = 0;
  uint64_t floor_bytes = 0;  // reserved for the pool
};
// Pools with bytes or a floor in a tier; the tiers of several GPUs are summed.
using PoolShares = std::map<std::pair<TierKind, TenantPool>, PoolShare>;

// A tenant's bytes in a tier are those of its two pools. Up to its floor a pool has its bytes for itself: the other
// pool neither evicts them nor fills them while they are free. Above the floors the pools compete.
class Level {
 public:
  Level(Tier& tier, EvictionPolicy& policy, Observer& observer) : tier_(tier), policy_(policy), observer_(observer) {}

  // Call it before anything is allocated. The floors of a tenant's pools together must not exceed its budget.
  void SetFloor(const TenantPool& pool, uint64_t bytes);

  // Allocates for the pool, if necessary in place of idle copies: the pool's own, or those that other pools have above
  // their floors. `evict` is called for each such copy and must free it, at once or, on a disk, soon; an object may end
  // before `evict` is called for it. If all idle copies would not be enough, none is evicted. Empty: there is no space,
  // or not yet.
  std::optional<Slot> Allocate(const TenantPool& pool, uint64_t extents, absl::FunctionRef<void(ObjectId)> evict);
  // Full: Allocate would have to evict copies for that number of extents. NextVictim: the first of them.
  bool Full(const TenantPool& pool, uint64_t extents) const { return extents > FreeExtents(pool); }
  Entry* NextVictim(const TenantPool& pool);  // null: none
  // Returns the idle copies that would be evicted first if the pool allocated that number of extents, dirty ones too.
  std::vector<Entry*> NextVictims(const TenantPool& pool, uint64_t extents);
  // Returns whether there is space for an object: free space or, with `evicting`, the space of copies that are each
  // worth less.
  bool HasSpaceFor(const RankedObject& object, uint64_t extents, bool evicting);
  // Returns whether extents of the tenant were evicted and are not free yet.
  bool IsFreeing(const TenantPool& pool) const { return FreeingExtents(pool.tenant) > 0; }

  // Frees an allocated slot or a part of one. Freed: another component frees the tier's extents.
  void Free(const TenantPool& pool, Slot slot);
  void Freed(const TenantPool& pool, uint64_t extents);
  // Counts a slot that an earlier run left.
  void Adopt(const TenantPool& pool, uint64_t extents) { shares_[pool].used += extents; }

  // Call it when the entry's copy is whole: it is ranked until Erase, and may be evicted while it is idle.
  void Track(Entry& entry, Rank& copy);
  void Touch(Rank& copy) { policy_.Touch(copy); }
  void SetIdle(const TenantPool& pool, Rank& copy, bool idle);
  void SetLower(Rank& copy, TierKind lower) { policy_.SetLower(copy, lower); }
  void Erase(Rank& copy) { policy_.Erase(copy); }  // call SetIdle(false) first

  void AddTo(PoolShares& shares) const;
  TierKind kind() const { return tier_.kind(); }
  PolicyKind policy() const { return policy_.kind(); }
  Tier& tier() const { return tier_; }

 private:
  struct Share {
    uint64_t floor = 0, used = 0, idle = 0;  // extents
  };
  const Share& ShareOf(const TenantPool& pool) const;
  uint64_t FreeExtents(const TenantPool& pool) const;  // extents that the pool may allocate without evicting
  uint64_t FreeingExtents(TenantId tenant) const;      // evicted, but not yet free
  // Returns idle copies with at least that number of extents in total; empty if there are not enough.
  std::vector<RankedObject*> Victims(const TenantPool& pool, uint64_t extents,
                                     EvictionPolicy::Purpose purpose = EvictionPolicy::Purpose::kEvict);
  // Returns how many extents of the other pool may be evicted for this one.
  uint64_t IdleOfOther(const TenantPool& pool) const;

  Tier& tier_;
  EvictionPolicy& policy_;
  Observer& observer_;
  std::map<TenantPool, Share> shares_;
};

}  // namespace ashlar::storage
