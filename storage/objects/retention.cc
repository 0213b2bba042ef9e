// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/retention.h"

#include <utility>

namespace ashlar::storage {

bool Retention::Pin(TenantId tenant, const Key& key, Nanos until) {
  bool any = false;
  for (const ObjectId id : table_.index().IdsOf(tenant, key)) {
    Entry* const entry = table_.index().Live(id);
    if (entry == nullptr || !entry->ready) continue;
    any = true;
    table_.Pin(*entry, until);
  }
  return any;
}

bool Retention::Unpin(TenantId tenant, const Key& key) {
  bool any = false;
  for (const ObjectId id : table_.index().IdsOf(tenant, key)) {
    Entry* const entry = table_.index().Live(id);
    if (entry == nullptr) continue;
    any |= entry->pinned;
    Unpin(*entry);
  }
  return any;
}

void Retention::Unpin(Entry& entry) {
  if (!entry.pinned) return;
  table_.lifetimes().Unpin(entry);
  table_.placement().Changed(entry);
}

bool Retention::Evict(TenantId tenant, const Key& key) {
  std::vector<ObjectId> ids;
  for (const Entry* entry : table_.index().keys().All(tenant, key)) {
    if (entry->ready) ids.push_back(entry->id);
  }
  for (const ObjectId id : ids) {
    if (Entry* entry = table_.index().Live(id)) {
      table_.End(*entry, MissReason::kEvicted, PolicyKind::kOperator, table_.levels().Nearest(*entry));
    }
  }
  return !ids.empty();
}

void Retention::SetTimeToLive(TenantId tenant, Nanos ttl) {
  std::vector<Entry*> live;
  table_.index().ForEach([&](Entry& entry) {
    if (entry.pool.tenant == tenant && entry.ready && entry.gone == MissReason::kNone) live.push_back(&entry);
  });
  table_.lifetimes().SetTimeToLive(tenant, ttl, std::move(live));
}

bool Retention::Tick(Slice& slice) {
  while (const ObjectId ended = table_.lifetimes().EndedPin()) {
    if (!slice.Take()) return false;
    Unpin(*table_.index().EntryOf(ended));
  }
  if (expiring_.empty()) expiring_ = table_.lifetimes().Expired();
  for (; !expiring_.empty(); expiring_.pop_back()) {
    if (!slice.Take()) return false;
    Entry* const entry = table_.index().Live(expiring_.back());
    if (entry == nullptr || !table_.lifetimes().IsExpired(*entry)) continue;  // it was used since
    table_.End(*entry, MissReason::kExpired, PolicyKind::kTtl, table_.levels().Nearest(*entry));
  }
  return true;
}

}  // namespace ashlar::storage
