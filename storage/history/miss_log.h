// SPDX-License-Identifier: Apache-2.0
// MissLog: the latest misses of every tenant.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "storage/history/explanation.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// A ring per tenant: the newest miss replaces the oldest.
class MissLog {
 public:
  static constexpr size_t kDefaultMisses = 1024;

  explicit MissLog(size_t misses_per_tenant = kDefaultMisses) : max_misses_(misses_per_tenant) {}

  void Add(TenantId tenant, const Miss& miss);
  std::vector<Miss> Last(TenantId tenant, size_t most) const;  // newest first
  void Erase(TenantId tenant, const NamespaceId* ns);          // null: the whole tenant

 private:
  struct Ring {
    std::vector<Miss> misses;
    size_t next = 0;  // index of the next entry once the ring is full
  };
  static_assert(kDefaultMisses * sizeof(Miss) <= 512 << 10, "a tenant's misses take at most 512 KiB");

  const size_t max_misses_;
  std::map<TenantId, Ring> rings_;
};

}  // namespace ashlar::storage
