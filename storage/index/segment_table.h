// Finds objects by key.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/policy/eviction.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// One object and its slot. Owned by the pool.
struct Entry {
  ObjectId id = 0;
  TenantId tenant = 0;
  ObjectHeader header;  // the plan until the object is ready
  Slot slot;
  bool ready = false;       // published; before that it is reserved or being published
  uint32_t references = 0;  // uses that keep the bytes where they are
  uint32_t uses = 0;        // look-ups that found it
  Nanos published_at = 0;
  Nanos last_used_at = 0;               // by a look-up; before the first one: published
  MissReason gone = MissReason::kNone;  // why no table has it any more; its bytes stay until the last reference goes
};

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
