// Tiers: the tiers of a cache, top to bottom.
#pragma once

#include <vector>

#include "storage/tier/remote_source.h"
#include "storage/tier/ssd_tier.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// All outlive the cache.
struct Tiers {
  std::vector<Tier*> memory;       // top to bottom: engines land from the first, and map it
  SsdTier* ssd = nullptr;          // below them; may be null
  RemoteSource* remote = nullptr;  // below all; may be null
};

}  // namespace ashlar::storage
