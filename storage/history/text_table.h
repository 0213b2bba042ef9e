// SPDX-License-Identifier: Apache-2.0
// TextTable: remembers the namespaces in which a text was published.
#pragma once

#include <cstddef>
#include <map>

#include "proto/key.h"
#include "storage/history/bounded_table.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// Two engines that should share, but declare different weights or layouts, publish the same texts in different
// namespaces. This table reveals that, within one tenant only. Each tenant has its own bounded table, in which the
// oldest texts are dropped first. Every call is O(1).
class TextTable {
 public:
  static constexpr size_t kDefaultTexts = 1 << 16;

  explicit TextTable(size_t texts_per_tenant = kDefaultTexts) : max_texts_(texts_per_tenant) {}

  // Call when an engine is about to publish the text; whether it does so makes no difference here.
  void Remember(TenantId tenant, const TextDigest& text, const NamespaceId& ns);
  // Returns the latest namespace other than `ns` in which the text was published; null if unknown. Valid until the next
  // Remember.
  const NamespaceId* Elsewhere(TenantId tenant, const TextDigest& text, const NamespaceId& ns) const;
  // Erases a tenant's texts, or one of its namespaces from them.
  void Erase(TenantId tenant, const NamespaceId* ns);

 private:
  // The latest two different namespaces: at least one differs from any given one.
  struct Namespaces {
    NamespaceId last;
    NamespaceId before;
    bool two = false;
  };
  using Memory = BoundedTable<TextDigest, Namespaces>;
  static_assert(kDefaultTexts * Memory::kBytesPerEntry <= 8 << 20, "a tenant's texts take at most 8 MiB");

  const size_t max_texts_;
  std::map<TenantId, Memory> memories_;
};

}  // namespace ashlar::storage
