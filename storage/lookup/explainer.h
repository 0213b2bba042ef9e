// SPDX-License-Identifier: Apache-2.0
// Explainer: explains misses. It compares a query with existing objects, evicted objects, and objects of other
// namespaces.
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

// Explaining has no side effect on the object table and does not count as a use.
class Explainer {
 public:
  Explainer(const ObjectTable& table, const Clock& clock, size_t texts_per_tenant, size_t misses_per_tenant)
      : table_(table), clock_(clock), texts_(texts_per_tenant), misses_(misses_per_tenant) {}

  // Remembers a published text, so that a miss in another namespace can be explained.
  void Published(TenantId tenant, const TextDigest& text, const NamespaceId& ns) { texts_.Remember(tenant, text, ns); }

  // Explains one query. If the key exists with another division into shards, the explanation names that division.
  Explanation Explain(TenantId tenant, const Query& query) const;

  // Records a miss and returns its reason, which may be more precise for an object that was never seen.
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
