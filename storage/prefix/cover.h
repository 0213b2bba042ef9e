// Which of what is there to take for a prompt: a prefix, and segments behind it.
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

// Whether a prefix of `depth` tokens spoils a segment that begins at `begin`: it ends behind the head, in an interior
// that would have to be composed whole, or in a segment at the prompt's beginning, which has no head.
constexpr bool SpoiledBy(uint64_t depth, uint64_t begin, uint64_t head) {
  return begin == 0 ? depth > 0 : depth > begin + head;
}

struct Cover {
  uint64_t prefix = 0;  // resume there
  std::vector<size_t>
      segments;      // then land these, in order; the first one of the prompt is a prefix, and not among them
  double saved = 0;  // of the cost of computing the prompt
};

// The cover that saves most, not the longest prefix first: that one may end inside a passage and spoil its hit, for an
// interior is of use only whole. Of a hit, all but its seam sides is saved: its first `head` and last `tail` tokens are
// computed again, but for what a prefix has of its head. A prefix has no seam behind it, and the segment that the
// prompt begins with is a prefix, exact to its end. `resumable`: depths, rising. `cost`: of computing that many tokens
// from the start; grows. Of equal covers the one with the shorter prefix. O(resumable + segments).
Cover BestCover(std::span<const uint64_t> resumable, std::span<const CoverSegment> segments, uint64_t head,
                uint64_t tail, absl::FunctionRef<double(uint64_t depth)> cost);

}  // namespace ashlar::storage
