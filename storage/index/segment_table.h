// Finds objects by key, and remembers why those that are gone are gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/policy/eviction.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// One object and its slot. Owned by the pool.
struct Entry {
  ObjectId id = 0;
  TenantId tenant = 0;
  ObjectHeader header;  // the plan until the object is ready
  Slot slot;
  bool ready = false;                   // published; before that it is reserved or being published
  uint32_t references = 0;              // uses that keep the bytes where they are
  MissReason gone = MissReason::kNone;  // why no table has it any more; its bytes stay until the last reference goes
};

// Keys are looked up within one tenant: whatever the key, nobody finds another's object.
class SegmentTable {
 public:
  // Remembers the reasons of the last `ghost_entries` keys that were removed.
  explicit SegmentTable(size_t ghost_entries) : max_ghosts_(ghost_entries) {}

  Entry* Find(TenantId tenant, const Key& key) const;  // null: not here
  MissReason WhyGone(TenantId tenant, const Key& key) const;

  // The entry's tenant and key must not be in the table yet.
  void Insert(Entry& entry);
  void Remove(const Entry& entry, MissReason why);

 private:
  using Id = std::pair<TenantId, Key>;
  struct Ghost {
    Id id;
    MissReason why;
  };

  void ForgetGhost(const Id& id);

  const size_t max_ghosts_;
  absl::flat_hash_map<Id, Entry*> entries_;
  std::list<Ghost> ghosts_;  // oldest first
  absl::flat_hash_map<Id, std::list<Ghost>::iterator> ghost_places_;
};

}  // namespace ashlar::storage
