// SPDX-License-Identifier: Apache-2.0
// GhostTable: remembers objects that are gone, and why, to explain later misses of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "proto/key.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/history/bounded_table.h"
#include "storage/policy/reuse_models.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// The last thing that happened to an object that no tier holds: it was evicted, dropped, declined, or never published
// after it had been reserved.
struct Ghost {
  MissReason reason = MissReason::kNeverSeen;
  PolicyKind policy = PolicyKind::kNone;  // by whose decision
  TierKind tier = TierKind::kNone;        // that held it last; none: no tier ever did
  uint32_t uses = 0;                      // look-ups that found it
  uint64_t bytes = 0;                     // of the object; of its plan where it was never published
  Nanos gone_at = 0;                      // when that happened, on the injected clock
  Nanos lived = 0;                        // from its publication until then; 0: never published
  Nanos idle = 0;                         // from its last use, or its publication, until then
  Reuse reuse;                            // of what was evicted
  uint64_t space = 0;                     // SpaceOf its namespace

  // The beginning of a namespace, enough to tell a tenant's few from each other.
  static uint64_t SpaceOf(const NamespaceId& ns);
};

// Keyed by tenant and key. Every call is O(1). Each tenant has a memory of its own, of a bounded number of ghosts with
// the oldest going first: one tenant's churn neither displaces what another one may ask for nor shows through.
class GhostTable {
 public:
  static constexpr size_t kDefaultGhosts = 1 << 16;

  explicit GhostTable(size_t ghosts_per_tenant = kDefaultGhosts) : max_ghosts_(ghosts_per_tenant) {}

  // Replaces what was remembered of this key; from now on it is the youngest.
  void Remember(TenantId tenant, const Key& key, const Ghost& ghost) {
    memories_.try_emplace(tenant, max_ghosts_).first->second.Put(key, ghost);
  }
  // Null: nothing is remembered. Valid until the next Remember or Erase.
  const Ghost* Find(TenantId tenant, const Key& key) const;
  // The object is there again. Harmless for a key that is not remembered.
  void Erase(TenantId tenant, const Key& key);
  // Everything of a tenant, or of one of its namespaces.
  void EraseAll(TenantId tenant, const NamespaceId* ns);

  size_t size(TenantId tenant) const;

 private:
  using Memory = BoundedTable<Key, Ghost>;
  static_assert(kDefaultGhosts * Memory::kBytesPerEntry <= 9 << 20, "what one tenant's ghosts take at most: 9 MiB");

  const size_t max_ghosts_;
  std::map<TenantId, Memory> memories_;
};

}  // namespace ashlar::storage
