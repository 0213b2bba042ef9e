// SPDX-License-Identifier: Apache-2.0
// BuildSteps: the steps that assemble a prompt: parts from the cache, in the prompt's order, and computed runs between
// them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ashlar/engine.h"

namespace ashlar::engine {

// Tokens [begin, end) taken from the cache.
struct CachedRun {
  uint32_t segment = 0;  // Step::kPrefix: a prefix beyond segments
  bool whole = false;    // true: a checkpoint, which begins at position 0
  uint64_t begin = 0, end = 0;
};

// Builds the steps of a prompt of `tokens` tokens. `cached` ascends; a part that begins before the end of the previous
// one is skipped. Runs are cut at the depths `captures`, ascending, at which states are wanted; depths inside cached
// parts are skipped.
std::vector<Step> BuildSteps(uint64_t tokens, std::span<const CachedRun> cached, std::span<const uint64_t> captures);

}  // namespace ashlar::engine
