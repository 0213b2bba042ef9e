// SPDX-License-Identifier: Apache-2.0
// Tiers: the tiers of a cache, top to bottom; those of several GPUs stand side by side.
#pragma once

#include <cstddef>
#include <vector>

#include "storage/tier/remote_source.h"
#include "storage/tier/ssd_tier.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// All outlive the cache.
struct Tiers {
  std::vector<Tier*> memory;       // top to bottom; the first `beside` stand side by side, and the next one below each
  SsdTier* ssd = nullptr;          // below them; may be null
  RemoteSource* remote = nullptr;  // below all; may be null
  size_t beside = 1;
  size_t common = 0;  // the level, in `memory`, that sessions land from and map which say no other (Cache::SetLevel)
};

}  // namespace ashlar::storage
