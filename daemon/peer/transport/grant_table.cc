// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/transport/grant_table.h"

#include <utility>

namespace ashlar::daemon {

void GrantTable::Add(const Grant& grant, uint64_t bytes, std::shared_ptr<GrantedBytes> granted) {
  auto allowed = std::make_shared<Allowed>(Allowed{grant, bytes, std::move(granted), {}, {}});
  MutexLock lock(mutex_);
  grants_[grant.number] = std::move(allowed);
}

std::shared_ptr<Allowed> GrantTable::Find(uint64_t number) const {
  MutexLock lock(mutex_);
  const auto found = grants_.find(number);
  return found == grants_.end() ? nullptr : found->second;
}

std::shared_ptr<Allowed> GrantTable::Remove(uint64_t number) {
  MutexLock lock(mutex_);
  const auto found = grants_.find(number);
  if (found == grants_.end()) return nullptr;
  std::shared_ptr<Allowed> removed = std::move(found->second);
  grants_.erase(found);
  return removed;
}

// The owners' callbacks run without the lock.
void GrantTable::Clear() {
  absl::flat_hash_map<uint64_t, std::shared_ptr<Allowed>> removed;
  MutexLock lock(mutex_);
  removed.swap(grants_);
}

size_t GrantTable::size() const {
  MutexLock lock(mutex_);
  return grants_.size();
}

}  // namespace ashlar::daemon
