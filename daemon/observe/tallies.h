// SPDX-License-Identifier: Apache-2.0
// Tallies: counters of one tenant since the daemon started.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

#include "proto/outcome.h"

namespace ashlar::daemon {

struct Tallies {
  struct Segments {
    uint64_t segments = 0, tokens = 0;
  };
  struct Objects {
    uint64_t objects = 0, bytes = 0;
  };
  std::map<TierKind, Segments> hits;
  std::map<MissReason, Segments> misses;
  std::map<std::tuple<TierKind, PolicyKind, MissReason>, Objects> evictions;
};

}  // namespace ashlar::daemon
