// SPDX-License-Identifier: Apache-2.0
// BestCover: which cached prefix and segments a prompt takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"

namespace ashlar::storage {

// A run of the prompt that stands by itself; runs are in order and do not overlap.
struct CoverSegment {
  uint64_t begin = 0, end = 0;
  bool hit = false;
};

// Returns whether a prefix of `depth` tokens spoils a segment that begins at `begin`: the prefix ends behind the
// segment's head, in an interior that would have to be composed whole, or in the prompt's first segment, which has no
// head.
constexpr bool SpoiledBy(uint64_t depth, uint64_t begin, uint64_t head) {
  return begin == 0 ? depth > 0 : depth > begin + head;
}

struct Cover {
  uint64_t prefix = 0;  // resume there
  std::vector<size_t>
      segments;      // then land these, in order; the first one of the prompt is a prefix, and not among them
  double saved = 0;  // of the cost of computing the prompt
};

// Returns the cover that saves most. That need not have the longest prefix: a prefix may end inside a passage and spoil
// its hit, because an interior is of use only whole. A hit saves all but its seam sides: its first `head` and last
// `tail` tokens are computed again, except those of its head that the prefix has. A prefix has no seam behind it, and
// the prompt's first segment is a prefix, exact to its end. `resumable`: depths, rising. `cost`: of computing that many
// tokens from the start; grows. Of equal covers the one with the shorter prefix. O(resumable + segments).
Cover BestCover(std::span<const uint64_t> resumable, std::span<const CoverSegment> segments, uint64_t head,
                uint64_t tail, absl::FunctionRef<double(uint64_t depth)> cost);

}  // namespace ashlar::storage
