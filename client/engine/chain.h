// The steps that set a prompt: what is taken from the cache, in the prompt's order, and runs between that are computed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ashlar/engine.h"

namespace ashlar::engine {

// Tokens [begin, end) that are taken from the cache.
struct CachedRun {
  uint32_t segment = 0;  // Step::kPrefix: a prefix beyond segments
  bool whole = false;    // with all states behind it: a checkpoint, from position 0
  uint64_t begin = 0, end = 0;
};

// Of a prompt of `tokens` tokens. `cached` ascends; what begins before the one before it has ended is left out. Runs
// are cut where states are wanted, at depths `captures`, which ascend; depths inside of what is cached are left out.
std::vector<Step> BuildSteps(uint64_t tokens, std::span<const CachedRun> cached, std::span<const uint64_t> captures);

}  // namespace ashlar::engine
