#include "storage/index/segment_table.h"

namespace ashlar::storage {

Entry* SegmentTable::Find(TenantId tenant, const Key& key) const {
  const auto found = entries_.find(Id(tenant, key));
  return found == entries_.end() ? nullptr : found->second;
}

void SegmentTable::Insert(Entry& entry) {
  entries_.emplace(Id(entry.group.tenant, entry.header.key), &entry);
}

void SegmentTable::Remove(const Entry& entry) {
  entries_.erase(Id(entry.group.tenant, entry.header.key));
}

}  // namespace ashlar::storage
