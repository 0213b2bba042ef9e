// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/object_index.h"

#include <utility>

namespace ashlar::storage {

Entry& ObjectIndex::Add(std::unique_ptr<Entry> entry) {
  entry->id = next_id_++;
  return *entries_.emplace(entry->id, std::move(entry)).first->second;
}

Entry* ObjectIndex::EntryOf(ObjectId id) const {
  const auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : found->second.get();
}

Entry* ObjectIndex::Live(ObjectId id) const {
  Entry* const entry = EntryOf(id);
  return entry == nullptr || entry->gone != MissReason::kNone ? nullptr : entry;
}

std::vector<ObjectId> ObjectIndex::IdsOf(TenantId tenant, const Key& key) const {
  std::vector<ObjectId> ids;
  for (const Entry* entry : keys_.All(tenant, key)) ids.push_back(entry->id);
  return ids;
}

bool ObjectIndex::Walk(ObjectId& after, ObjectId last, Slice& slice, absl::FunctionRef<bool(Entry&)> visit) const {
  while (true) {
    const auto next = entries_.upper_bound(after);
    if (next == entries_.end() || next->first > last) return true;
    if (!slice.Take()) return false;
    after = next->first;
    if (!visit(*next->second)) return true;
  }
}

void ObjectIndex::ForEach(absl::FunctionRef<void(Entry&)> visit) const {
  for (const auto& [id, entry] : entries_) visit(*entry);
}

}  // namespace ashlar::storage
