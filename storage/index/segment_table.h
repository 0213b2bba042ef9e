// Finds objects by key.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "proto/key.h"
#include "storage/entry.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// Keys are looked up within one tenant: whatever the key, nobody finds another's object.
class SegmentTable {
 public:
  Entry* Find(TenantId tenant, const Key& key) const;  // null: not here
  // The entry's tenant and key must not be in the table yet.
  void Insert(Entry& entry);
  void Remove(const Entry& entry);

 private:
  using Id = std::pair<TenantId, Key>;
  absl::flat_hash_map<Id, Entry*> entries_;
};

}  // namespace ashlar::storage
