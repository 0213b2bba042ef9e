// SPDX-License-Identifier: Apache-2.0
// SegmentTable: finds objects by key.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/key.h"
#include "proto/shard.h"
#include "storage/objects/entry.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// Keys are looked up within one tenant: no key finds another tenant's object.
class SegmentTable {
 public:
  Entry* Find(TenantId tenant, const Key& key, const TensorShard& shard = {}) const;  // null if not here
  // Returns all objects of a key: the whole model's object, and shards of any size.
  std::vector<Entry*> All(TenantId tenant, const Key& key) const;
  // Returns the present shards of the bundle of `size` shards of `key`.
  std::vector<Entry*> Bundle(TenantId tenant, const Key& key, uint32_t size) const;
  // The entry's tenant, key and shard must not be in the table yet.
  void Insert(Entry& entry);
  void Remove(const Entry& entry);

 private:
  using Id = std::pair<TenantId, Key>;
  absl::flat_hash_map<Id, Entry*> whole_;
  absl::flat_hash_map<Id, std::vector<Entry*>> shards_;  // ordered by arrival; few, because there are few ranks
};

}  // namespace ashlar::storage
