// SPDX-License-Identifier: Apache-2.0
// Level: one tier as a place for copies. It counts how much each pool of each tenant has, and chooses the victims when
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
  uint64_t floor_bytes = 0;  // that it has for itself
};
// The pools that have something of a tier, or a floor there; of all GPUs together.
using PoolShares = std::map<std::pair<TierKind, TenantPool>, PoolShare>;

// A tenant's bytes in a tier are its two pools' together. Up to its floor a pool has its bytes for itself: the other
// one neither evicts them nor fills them while they are free. Above the floors the pools compete.
class Level {
 public:
  Level(Tier& tier, EvictionPolicy& policy, Observer& observer) : tier_(tier), policy_(policy), observer_(observer) {}

  // Before anything is allocated. The floors of a tenant's pools together must not exceed its budget.
  void SetFloor(const TenantPool& pool, uint64_t bytes);

  // Allocates for the pool, if necessary in place of idle copies: the pool's own, or those that other pools have above
  // their floors. `give_up` is called for each such copy and must free it, at once or (on a disk) soon; an object may
  // be gone before its call. If all copies that may leave would not be enough, none is given up. Empty: no room, or not
  // yet.
  std::optional<Slot> MakeRoom(const TenantPool& pool, uint64_t extents, absl::FunctionRef<void(ObjectId)> give_up);
  // Full: MakeRoom would have to give up copies for so many extents. NextVictim: the first of them.
  bool Full(const TenantPool& pool, uint64_t extents) const { return extents > FreeExtents(pool); }
  Entry* NextVictim(const TenantPool& pool);  // null: none
  // Returns whether there is room for a coming object: free, or (`evicting`) of copies that are each worth less.
  bool HasRoomFor(const RankedObject& coming, uint64_t extents, bool evicting);
  // Returns whether extents were given up and are not free yet.
  bool Coming(const TenantPool& pool) const { return ComingExtents(pool.tenant) > 0; }

  // A slot of MakeRoom's is given back, whole or in part, or was handed to others for that.
  void Free(const TenantPool& pool, Slot slot);
  void Freed(const TenantPool& pool, uint64_t extents);
  // A slot that is there from before, as after a restart.
  void Adopt(const TenantPool& pool, uint64_t extents) { shares_[pool].used += extents; }

  // The entry's copy here is whole: ranked from now on until it is erased; it may be given up while it is idle.
  void Track(Entry& entry, Rank& copy);
  void Touch(Rank& copy) { policy_.Touch(copy); }
  void SetIdle(const TenantPool& pool, Rank& copy, bool idle);
  void Erase(Rank& copy) { policy_.Erase(copy); }  // not idle

  void AddTo(PoolShares& shares) const;
  TierKind kind() const { return tier_.kind(); }
  PolicyKind policy() const { return policy_.kind(); }
  Tier& tier() const { return tier_; }

 private:
  struct Share {
    uint64_t floor = 0, used = 0, idle = 0;  // extents
  };
  const Share& ShareOf(const TenantPool& pool) const;
  uint64_t FreeExtents(const TenantPool& pool) const;  // that the pool may take without evicting
  uint64_t ComingExtents(TenantId tenant) const;       // given up, and not yet free
  // Idle copies of so much together; none where there is not so much.
  std::vector<RankedObject*> Victims(const TenantPool& pool, uint64_t extents);

  Tier& tier_;
  EvictionPolicy& policy_;
  Observer& observer_;
  std::map<TenantPool, Share> shares_;
};

}  // namespace ashlar::storage
