#include "storage/history/miss_log.h"

#include <algorithm>

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

}  // namespace ashlar::storage
