// SPDX-License-Identifier: Apache-2.0
// InFlight: the landings and compositions that tenants have in flight at once, and their bounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>

#include "storage/ids.h"

namespace ashlar::storage {

// The metadata thread only.
class InFlight {
 public:
  struct Bounds {
    size_t calls = SIZE_MAX;
    uint64_t bytes = UINT64_MAX;  // that the calls hold in memory, such as page tables
  };

  // Sets a tenant's bounds; without a call it has none.
  void SetBounds(TenantId tenant, const Bounds& bounds) { shares_[tenant].bounds = bounds; }

  // Counts work in flight. False: it would be too much, and nothing was counted.
  bool Begin(TenantId tenant, uint64_t bytes) {
    Share& share = shares_[tenant];
    if (share.calls >= share.bounds.calls || bytes > share.bounds.bytes - std::min(share.bytes, share.bounds.bytes))
      return false;
    ++share.calls;
    share.bytes += bytes;
    return true;
  }
  void End(TenantId tenant, uint64_t bytes) {
    Share& share = shares_[tenant];
    --share.calls;
    share.bytes -= bytes;
  }

 private:
  struct Share {
    Bounds bounds;
    size_t calls = 0;
    uint64_t bytes = 0;  // above the bound only where that was lowered meanwhile
  };
  std::map<TenantId, Share> shares_;
};

}  // namespace ashlar::storage
