// SPDX-License-Identifier: Apache-2.0
// GhostTable: remembers objects that are gone and the reason, to explain later misses.
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

// The last event of an object that no tier holds: it was evicted, dropped, declined, or reserved and never published.
struct Ghost {
  MissReason reason = MissReason::kNeverSeen;
  PolicyKind policy = PolicyKind::kNone;  // policy that decided
  TierKind tier = TierKind::kNone;        // last tier with the object; kNone if there never was one
  uint32_t uses = 0;                      // lookups that found it
  uint64_t bytes = 0;                     // size of the object, or of its plan if it was never published
  Nanos gone_at = 0;                      // when it happened, on the injected clock
  Nanos lived = 0;                        // from publication to gone_at; 0: never published
  Nanos idle = 0;                         // from the last use or publication to gone_at
  Reuse reuse;                            // set if the object was evicted
  uint64_t space = 0;                     // SpaceOf the namespace

  // The first bytes of a namespace, enough to distinguish a tenant's few namespaces.
  static uint64_t SpaceOf(const NamespaceId& ns);
};

// Keyed by tenant and key. Every call is O(1). Each tenant has its own bounded table, in which the oldest ghosts are
// dropped first, so that one tenant's churn neither displaces another tenant's ghosts nor reveals anything.
class GhostTable {
 public:
  static constexpr size_t kDefaultGhosts = 1 << 16;

  explicit GhostTable(size_t ghosts_per_tenant = kDefaultGhosts) : max_ghosts_(ghosts_per_tenant) {}

  // Inserts or replaces the ghost, which becomes the youngest.
  void Remember(TenantId tenant, const Key& key, const Ghost& ghost) {
    memories_.try_emplace(tenant, max_ghosts_).first->second.Put(key, ghost);
  }
  // Null if unknown. Valid until the next Remember or Erase.
  const Ghost* Find(TenantId tenant, const Key& key) const;
  // The object exists again. Unknown keys are ignored.
  void Erase(TenantId tenant, const Key& key);
  // Erases all ghosts of a tenant, or of one of its namespaces.
  void EraseAll(TenantId tenant, const NamespaceId* ns);

  size_t size(TenantId tenant) const;

 private:
  using Memory = BoundedTable<Key, Ghost>;
  static_assert(kDefaultGhosts * Memory::kBytesPerEntry <= 9 << 20, "a tenant's ghosts take at most 9 MiB");

  const size_t max_ghosts_;
  std::map<TenantId, Memory> memories_;
};

}  // namespace ashlar::storage
