// SPDX-License-Identifier: Apache-2.0
// Inventory: the objects of the cache, as operators list and count them.
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

// Of which objects. What is not set is any.
struct Selection {
  std::optional<TenantId> tenant;
  std::optional<NamespaceId> ns;
  std::optional<ObjectKind> kind;
  TierKind tier = TierKind::kNone;  // that has a whole copy
};

struct Listed {
  ObjectId id = 0;
  TenantPool pool;
  NamespaceId ns;
  Key key;
  ObjectKind kind = ObjectKind::kSegment;
  TensorShard shard;
  uint64_t tokens = 0, bytes = 0;
  std::vector<TierKind> tiers;  // with whole copies, top to bottom; a disk counts once it has acknowledged its copy
  uint32_t uses = 0;            // look-ups that found it
  uint32_t references = 0;
  bool pinned = false;
  Nanos age = 0, idle = 0;  // since its publication, since its last use
};

// Looking counts as no use. The metadata thread.
class Inventory {
 public:
  Inventory(ObjectTable& table, const Clock& clock) : table_(table), clock_(clock) {}

  // Published objects in the order in which they came, behind `after`, which becomes the last one that was looked at:
  // an object is listed once, whatever comes and goes meanwhile. A step of the slice each. Returns false where the
  // slice ended, or `page` had `most` objects, before the last object: call again.
  bool List(const Selection& selection, size_t most, ObjectId& after, std::vector<Listed>& page, Slice& slice) const;

  struct Tally {
    uint64_t objects = 0, bytes = 0;
    uint64_t leased_objects = 0, leased_bytes = 0;  // of these: held by leases, landings or publications
    std::array<uint64_t, 4> tier_bytes{};           // of whole copies, by TierKind
  };
  // Likewise for sums.
  bool Count(const Selection& selection, ObjectId& after, Tally& tally, Slice& slice) const;

  // Of an object that is not gone, whatever the tier.
  static bool Has(const Selection& selection, const Entry& entry);

 private:
  bool HasTier(const Selection& selection, const Entry& entry) const;

  ObjectTable& table_;
  const Clock& clock_;
};

}  // namespace ashlar::storage
