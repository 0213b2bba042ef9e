// SPDX-License-Identifier: Apache-2.0
// ObjectFinder: finds objects for lookups, and brings them to the level of the engine that asks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "proto/shard.h"
#include "storage/executor.h"
#include "storage/history/explanation.h"
#include "storage/ids.h"
#include "storage/objects/object_reference.h"
#include "storage/objects/object_table.h"
#include "storage/policy/promotion.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

class ObjectFinder {
 public:
  // Both must outlive the finder.
  ObjectFinder(ObjectTable& table, const Clock& clock) : table_(table), clock_(clock) {}

  // Finds a published object and records one use. An object that the level lacks is brought there
  // (ObjectReference::WhenLoaded); the object that is needed first is promoted first. If promoting and landing would
  // take longer than computing, the result is a miss, kSlowerThanRecompute. A shard of a bundle is found if all shards
  // are there; references to the others, at the levels of their ranks, are added to `others`. kWhereItLies: for another
  // node, each object at the level that has it (Levels::LevelToSendFrom).
  static constexpr size_t kWhereItLies = SIZE_MAX;
  FoundObject Find(TenantId tenant, const Query& query, std::vector<ObjectReference>* others = nullptr,
                   size_t level = 0);
  // What Find would load of an object to the level; empty if there is none. Has no side effect.
  PromotionCost::Load LoadOf(TenantId tenant, const Query& query, size_t level) const;
  // Calls `waits` for each memory tier in which Find would allocate that number of extents, until it returns true.
  // Returns whether it did.
  bool AnyTarget(TenantId tenant, const Query& query, size_t level,
                 absl::FunctionRef<bool(Tier& tier, uint64_t extents)> waits);
  // Returns another shard of an object's bundle, at the level of its rank; empty if it is not there, or the object is
  // gone.
  ObjectReference Shard(const ObjectReference& object, const TensorShard& shard);
  // Returns another shard at this level, and brings it there for a rank of an engine on that level. A miss if there is
  // no space.
  FoundObject ShardAt(const ObjectReference& object, const TensorShard& shard, size_t level);

 private:
  static constexpr uint32_t kFoundTwice = 2;

  void Use(Entry& entry, const Query& query);

  ObjectTable& table_;
  const Clock& clock_;
};

}  // namespace ashlar::storage
