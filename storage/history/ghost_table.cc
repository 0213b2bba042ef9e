// SPDX-License-Identifier: Apache-2.0
#include "storage/history/ghost_table.h"

#include <cstring>

namespace ashlar::storage {

const Ghost* GhostTable::Find(TenantId tenant, const Key& key) const {
  const auto memory = memories_.find(tenant);
  return memory == memories_.end() ? nullptr : memory->second.Find(key);
}

void GhostTable::Erase(TenantId tenant, const Key& key) {
  const auto memory = memories_.find(tenant);
  if (memory != memories_.end()) memory->second.Erase(key);
}

uint64_t Ghost::SpaceOf(const NamespaceId& ns) {
  uint64_t space = 0;
  std::memcpy(&space, ns.bytes.data(), sizeof space);
  return space;
}

void GhostTable::EraseAll(TenantId tenant, const NamespaceId* ns) {
  if (ns == nullptr) {
    memories_.erase(tenant);
    return;
  }
  const auto memory = memories_.find(tenant);
  if (memory == memories_.end()) return;
  memory->second.EraseIf(
      [space = Ghost::SpaceOf(*ns)](const Key&, const Ghost& ghost) { return ghost.space == space; });
}

size_t GhostTable::size(TenantId tenant) const {
  const auto memory = memories_.find(tenant);
  return memory == memories_.end() ? 0 : memory->second.size();
}

}  // namespace ashlar::storage
