// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/lifetimes.h"

#include <algorithm>

namespace ashlar::storage {

void Lifetimes::SetTimeToLive(TenantId tenant, Nanos ttl, std::vector<Entry*> live) {
  const auto known = ttls_.find(tenant);
  if (known != ttls_.end()) {
    known->second = ttl;
    return;
  }
  if (ttl == 0) return;
  ttls_[tenant] = ttl;
  std::ranges::stable_sort(live, {}, &Entry::last_used_at);
  std::list<Entry*>& order = by_use_[tenant];
  for (Entry* const entry : live) entry->by_use = order.insert(order.end(), entry);
}

void Lifetimes::Used(Entry& entry) {
  entry.last_used_at = clock_.Now();
  if (!ttls_.contains(entry.pool.tenant)) return;
  std::list<Entry*>& order = by_use_[entry.pool.tenant];
  if (entry.by_use) {
    order.splice(order.end(), order, *entry.by_use);
  } else {
    entry.by_use = order.insert(order.end(), &entry);
  }
}

void Lifetimes::Pin(Entry& entry, Nanos until) {
  Unpin(entry);
  entry.pinned = true;
  entry.pinned_until = until;
  if (until > 0) pins_.emplace(until, entry.id);
}

void Lifetimes::Unpin(Entry& entry) {
  if (!entry.pinned) return;
  entry.pinned = false;
  pins_.erase({entry.pinned_until, entry.id});
}

void Lifetimes::End(Entry& entry) {
  if (entry.pinned) pins_.erase({entry.pinned_until, entry.id});
  if (entry.by_use) by_use_.at(entry.pool.tenant).erase(*std::exchange(entry.by_use, std::nullopt));
}

bool Lifetimes::IsExpired(const Entry& entry) const {
  const auto ttl = ttls_.find(entry.pool.tenant);
  return ttl != ttls_.end() && ttl->second > 0 && entry.references == 0 && !entry.pinned &&
         clock_.Now() - entry.last_used_at >= ttl->second;
}

std::vector<ObjectId> Lifetimes::Expired() const {
  std::vector<ObjectId> expired;
  for (const auto& [tenant, order] : by_use_) {
    const Nanos ttl = ttls_.at(tenant);
    size_t found = 0;
    for (const Entry* entry : order) {
      if (ttl == 0 || clock_.Now() - entry->last_used_at < ttl || found == kMostAtOnce) break;
      if (!IsExpired(*entry)) continue;
      expired.push_back(entry->id);
      ++found;
    }
  }
  std::ranges::reverse(expired);
  return expired;
}

ObjectId Lifetimes::EndedPin() const {
  return !pins_.empty() && pins_.begin()->first <= clock_.Now() ? pins_.begin()->second : 0;
}

}  // namespace ashlar::storage
