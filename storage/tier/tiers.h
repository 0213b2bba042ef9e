// SPDX-License-Identifier: Apache-2.0
// Tiers: the tiers of a cache, fastest first. Those of several GPUs are on one level.
#pragma once

#include <cstddef>
#include <vector>

#include "storage/tier/remote_source.h"
#include "storage/tier/ssd_tier.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// All must outlive the cache.
struct Tiers {
  // Fastest first. The first `sibling_count` are siblings; memory[sibling_count] is the level below each of them.
  std::vector<Tier*> memory;
  SsdTier* ssd = nullptr;          // after them; may be null
  RemoteSource* remote = nullptr;  // after all others; may be null
  size_t sibling_count = 1;
  size_t common = 0;  // the index in `memory` that sessions use unless they set another (Cache::SetLevel)
};

}  // namespace ashlar::storage
