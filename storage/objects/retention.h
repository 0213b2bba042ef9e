// SPDX-License-Identifier: Apache-2.0
// Retention: how long objects stay: operators' pins and evictions, and the expiry of unused objects.
#pragma once

#include <vector>

#include "proto/key.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/slice.h"

namespace ashlar::storage {

class Retention {
 public:
  // The table must outlive this object.
  explicit Retention(ObjectTable& table) : table_(table) {}

  // These act on all objects of a key. They return false if there is none.
  //
  // Pin: until `until` (0: no end) one copy stays in some tier, even if space is needed. A second pin replaces the
  // first. Evict: the object leaves all tiers; leased bytes leave with their leases.
  bool Pin(TenantId tenant, const Key& key, Nanos until);
  bool Unpin(TenantId tenant, const Key& key);
  bool Evict(TenantId tenant, const Key& key);

  // Objects of this tenant expire when they were not used for `ttl` (0: never).
  void SetTimeToLive(TenantId tenant, Nanos ttl);
  // Ends pins and expires objects, one slice at a time. False: call again.
  bool Tick(Slice& slice);

 private:
  void Unpin(Entry& entry);

  ObjectTable& table_;
  std::vector<ObjectId> expiring_;  // found by the last tick, and not yet ended
};

}  // namespace ashlar::storage
