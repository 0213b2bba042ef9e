// SPDX-License-Identifier: Apache-2.0
// TextTable: remembers under which namespaces a text was published.
#pragma once

#include <cstddef>
#include <map>

#include "proto/key.h"
#include "storage/history/bounded_table.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// Two engines that were meant to share, but declare different weights or layouts, never do: each publishes the same
// texts under a namespace of its own. This table is how that shows. Within one tenant only; each has a bounded memory
// of its own, the text that was published longest ago going first. Every call is O(1).
class TextTable {
 public:
  static constexpr size_t kDefaultTexts = 1 << 16;

  explicit TextTable(size_t texts_per_tenant = kDefaultTexts) : max_texts_(texts_per_tenant) {}

  // An engine sets out to publish the text: whether it will, makes no difference to who looks elsewhere.
  void Remember(TenantId tenant, const TextDigest& text, const NamespaceId& ns);
  // The last namespace but `ns` under which the text was published; null: none is remembered. Valid until the next
  // Remember.
  const NamespaceId* Elsewhere(TenantId tenant, const TextDigest& text, const NamespaceId& ns) const;
  // Erases what a tenant published, or under which texts one of its namespaces stands.
  void Erase(TenantId tenant, const NamespaceId* ns);

 private:
  // The last two that differ: whoever asks, one of them is another's.
  struct Namespaces {
    NamespaceId last;
    NamespaceId before;
    bool two = false;
  };
  using Memory = BoundedTable<TextDigest, Namespaces>;
  static_assert(kDefaultTexts * Memory::kBytesPerEntry <= 8 << 20, "what one tenant's texts take at most: 8 MiB");

  const size_t max_texts_;
  std::map<TenantId, Memory> memories_;
};

}  // namespace ashlar::storage
