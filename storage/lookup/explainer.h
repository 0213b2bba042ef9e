// SPDX-License-Identifier: Apache-2.0
// Explainer: why look-ups miss. It compares a query with the objects that are here, that are gone, and that other
// namespaces have.
#pragma once

#include <cstddef>
#include <vector>

#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/history/explanation.h"
#include "storage/history/miss_log.h"
#include "storage/history/text_table.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"

namespace ashlar::storage {

// Looking changes nothing in the table, and counts as no use.
class Explainer {
 public:
  Explainer(const ObjectTable& table, const Clock& clock, size_t texts_per_tenant, size_t misses_per_tenant)
      : table_(table), clock_(clock), texts_(texts_per_tenant), misses_(misses_per_tenant) {}

  // Remembers a published text: from now on a miss of it under another namespace says so.
  void Published(TenantId tenant, const TextDigest& text, const NamespaceId& ns) { texts_.Remember(tenant, text, ns); }

  // Explains one query. For a key that is here in another division into shards, the explanation names that division.
  Explanation Explain(TenantId tenant, const Query& query) const;

  // Remembers a miss, and answers its reason: of one that was never seen it may be known better.
  MissReason Missed(SessionId session, TenantId tenant, const Query& query, MissReason reason);
  std::vector<Miss> LastMisses(TenantId tenant, size_t most) const { return misses_.Last(tenant, most); }
  // Erases the texts and misses of a tenant, or of one of its namespaces.
  void Erase(TenantId tenant, const NamespaceId* ns) {
    texts_.Erase(tenant, ns);
    misses_.Erase(tenant, ns);
  }

 private:
  Presence Describe(const std::vector<Entry*>& here, const TensorShard& shard) const;

  const ObjectTable& table_;
  const Clock& clock_;
  TextTable texts_;
  MissLog misses_;
};

}  // namespace ashlar::storage
