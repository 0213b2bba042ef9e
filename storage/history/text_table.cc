// SPDX-License-Identifier: Apache-2.0
#include "storage/history/text_table.h"

namespace ashlar::storage {

void TextTable::Remember(TenantId tenant, const TextDigest& text, const NamespaceId& ns) {
  Memory& memory = memories_.try_emplace(tenant, max_texts_).first->second;
  Namespaces namespaces{.last = ns};
  if (const Namespaces* known = memory.Find(text); known != nullptr) {
    const bool same = known->last == ns;
    namespaces.before = same ? known->before : known->last;
    namespaces.two = same ? known->two : true;
  }
  memory.Put(text, namespaces);
}

void TextTable::Erase(TenantId tenant, const NamespaceId* ns) {
  if (ns == nullptr) {
    memories_.erase(tenant);
    return;
  }
  const auto memory = memories_.find(tenant);
  if (memory == memories_.end()) return;
  memory->second.EraseIf([ns](const TextDigest&, Namespaces& known) {
    if (known.two && known.last == *ns) known.last = known.before;
    if (known.two && (known.last == known.before || known.before == *ns)) known = {.last = known.last};
    return known.last == *ns;
  });
}

const NamespaceId* TextTable::Elsewhere(TenantId tenant, const TextDigest& text, const NamespaceId& ns) const {
  const auto memory = memories_.find(tenant);
  if (memory == memories_.end()) return nullptr;
  const Namespaces* known = memory->second.Find(text);
  if (known == nullptr) return nullptr;
  if (known->last != ns) return &known->last;
  return known->two ? &known->before : nullptr;
}

}  // namespace ashlar::storage
