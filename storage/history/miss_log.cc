// SPDX-License-Identifier: Apache-2.0
#include "storage/history/miss_log.h"

#include <algorithm>
#include <utility>

namespace ashlar::storage {

void MissLog::Add(TenantId tenant, const Miss& miss) {
  if (max_misses_ == 0) return;
  Ring& ring = rings_[tenant];
  if (ring.misses.size() < max_misses_) return ring.misses.push_back(miss);
  ring.misses[ring.next] = miss;
  ring.next = (ring.next + 1) % max_misses_;
}

std::vector<Miss> MissLog::Last(TenantId tenant, size_t most) const {
  const auto found = rings_.find(tenant);
  if (found == rings_.end()) return {};
  const auto& [misses, next] = found->second;
  std::vector<Miss> last;
  for (size_t age = 0; age < std::min(most, misses.size()); ++age) {
    last.push_back(misses[(next + misses.size() - 1 - age) % misses.size()]);
  }
  return last;
}

void MissLog::Erase(TenantId tenant, const NamespaceId* ns) {
  std::vector<Miss> kept = ns == nullptr ? std::vector<Miss>() : Last(tenant, max_misses_);
  rings_.erase(tenant);
  // A miss of an unknown namespace may belong to this one, so it is erased too.
  std::erase_if(kept, [ns](const Miss& miss) { return miss.query.ns == *ns || miss.query.ns == NamespaceId{}; });
  std::ranges::reverse(kept);
  if (!kept.empty()) rings_[tenant].misses = std::move(kept);
}

}  // namespace ashlar::storage
