// SPDX-License-Identifier: Apache-2.0
// InFlight: the landings and compositions that tenants have in flight, and their limits.
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
    uint64_t bytes = UINT64_MAX;  // memory that the calls hold, such as page tables
  };

  // Sets a tenant's limits; unlimited by default.
  void SetBounds(TenantId tenant, const Bounds& bounds) { shares_[tenant].bounds = bounds; }

  // Counts work in flight. Returns false without counting if it would exceed a limit.
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
    uint64_t bytes = 0;  // exceeds the limit only after the limit was lowered
  };
  std::map<TenantId, Share> shares_;
};

}  // namespace ashlar::storage
