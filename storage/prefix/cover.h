// SPDX-License-Identifier: Apache-2.0
// BestCover: chooses the cached prefix and segments that a prompt uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"

namespace ashlar::storage {

// An independent run of the prompt; runs are in order and do not overlap.
struct CoverSegment {
  uint64_t begin = 0, end = 0;
  bool hit = false;
};

// Returns whether a prefix of `depth` tokens makes a segment that begins at `begin` useless: the prefix ends after the
// segment's head, inside an interior that must be composed as a whole, or inside the prompt's first segment, which has
// no head.
constexpr bool SpoiledBy(uint64_t depth, uint64_t begin, uint64_t head) {
  return begin == 0 ? depth > 0 : depth > begin + head;
}

struct Cover {
  uint64_t prefix = 0;  // resume at this depth
  std::vector<size_t>
      segments;      // then land these, in order; the prompt's first segment is a prefix, and not among them
  double saved = 0;  // fraction of the cost of computing the prompt
};

// Returns the cover that saves most. That need not have the longest prefix: a prefix may end inside a segment and make
// its hit useless, because an interior is only usable as a whole. A hit saves everything except its seams: the first
// `head` and last `tail` tokens are recomputed, except head tokens that the prefix covers. A prefix has no seam after
// it, and the prompt's first segment is a prefix, exact up to its end. `resumable` are depths, ascending. `cost` is
// that of computing that many tokens from the start; increasing. Ties go to the shorter prefix. O(resumable +
// segments).
Cover BestCover(std::span<const uint64_t> resumable, std::span<const CoverSegment> segments, uint64_t head,
                uint64_t tail, absl::FunctionRef<double(uint64_t depth)> cost);

}  // namespace ashlar::storage
