#include "storage/history/ghost_table.h"

namespace ashlar::storage {

const Ghost* GhostTable::Find(TenantId tenant, const Key& key) const {
  const auto memory = memories_.find(tenant);
  return memory == memories_.end() ? nullptr : memory->second.Find(key);
}

void GhostTable::Forget(TenantId tenant, const Key& key) {
  const auto memory = memories_.find(tenant);
  if (memory != memories_.end()) memory->second.Erase(key);
}

size_t GhostTable::size(TenantId tenant) const {
  const auto memory = memories_.find(tenant);
  return memory == memories_.end() ? 0 : memory->second.size();
}

}  // namespace ashlar::storage
