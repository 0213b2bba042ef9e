// SPDX-License-Identifier: Apache-2.0
// Inventory: lists and counts the objects of the cache for operators.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "proto/key.h"
#include "proto/outcome.h"
#include "proto/shard.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/slice.h"

namespace ashlar::storage {

// Filter for objects. Unset fields match all.
struct Selection {
  std::optional<TenantId> tenant;
  std::optional<NamespaceId> ns;
  std::optional<ObjectKind> kind;
  TierKind tier = TierKind::kNone;  // tier with a complete copy
};

struct Listed {
  ObjectId id = 0;
  TenantPool pool;
  NamespaceId ns;
  Key key;
  ObjectKind kind = ObjectKind::kSegment;
  TensorShard shard;
  uint64_t tokens = 0, bytes = 0;
  std::vector<TierKind> tiers;  // tiers with complete copies, fastest first; a disk copy counts when acknowledged
  uint32_t uses = 0;            // lookups that found it
  uint32_t references = 0;
  bool pinned = false;
  Nanos age = 0, idle = 0;  // since publication, since the last use
};

// Does not count as use. The metadata thread only.
class Inventory {
 public:
  Inventory(ObjectTable& table, const Clock& clock) : table_(table), clock_(clock) {}

  // Lists published objects in order of insertion, after `after`, which becomes the last examined one. An object is
  // listed once, even if the cache changes meanwhile. One step per object. Returns false if the slice ended, or `page`
  // has `most` objects, before the last object: call again.
  bool List(const Selection& selection, size_t most, ObjectId& after, std::vector<Listed>& page, Slice& slice) const;

  struct Tally {
    uint64_t objects = 0, bytes = 0;
    uint64_t leased_objects = 0, leased_bytes = 0;  // part of these, held by leases, landings or publishes
    std::array<uint64_t, 4> tier_bytes{};           // bytes of complete copies, by TierKind
  };
  // The same for sums.
  bool Count(const Selection& selection, ObjectId& after, Tally& tally, Slice& slice) const;

  // Returns the tiers with a complete copy of one object, fastest first; a disk copy counts when acknowledged.
  std::vector<TierKind> Where(TenantId tenant, const Key& key, const TensorShard& shard = {}) const {
    return table_.levels().TiersOf(table_.index().keys().Find(tenant, key, shard));
  }

  // For an existing object, ignoring the tier.
  static bool Has(const Selection& selection, const Entry& entry);

 private:
  bool HasTier(const Selection& selection, const Entry& entry) const;

  ObjectTable& table_;
  const Clock& clock_;
};

}  // namespace ashlar::storage
