// SPDX-License-Identifier: Apache-2.0
// Ways to place checkpoints without knowing where prompts diverge.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ashlar::replay {

// The heuristics with which Sparse Prefix Caching compares its own placement: positions in (0, length), at multiples of
// `page`, at most `checkpoints`.
enum class Spacing : uint8_t {
  kBalanced,     // equal gaps: best under a uniform model
  kBlock,        // every 2^k pages, with the smallest k that needs at most `checkpoints`
  kRoot,         // dense towards the end: the i-th at √(i / (n + 1)) of the length
  kLogarithmic,  // dense towards the start: each twice as deep as the one before
};
std::vector<uint64_t> Space(Spacing spacing, uint64_t length, uint64_t page, size_t checkpoints);

}  // namespace ashlar::replay
