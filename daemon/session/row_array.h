// SPDX-License-Identifier: Apache-2.0
// RowArray: the rows of one plane in an engine's pages, which are all keys, or all values, of one layer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "absl/numeric/int128.h"

namespace ashlar::daemon {

// Offsets and strides in bytes. Counts and row_bytes are at least 1.
struct RowArray {
  struct Dimension {
    uint64_t stride;
    uint64_t count;
  };
  uint64_t offset;
  uint64_t row_bytes;
  std::array<Dimension, 3> dimensions;  // pages, tokens, heads

  // One past the last byte. 128 bits hold any sum of three products of 64 × 32 bits.
  absl::uint128 End() const;

  // Returns whether rows are disjoint: nested from the smallest stride to the largest, each stride covers all that is
  // inside.
  bool Disjoint() const;
};

// Returns whether a row of `a` shares a byte with a row of `b`. Both are Disjoint and end below 2^62. The time grows
// with the number of dimensions, not of rows. The answer is exact for planes that lie apart and for planes that
// interleave in equal steps, such as the planes of one page, or keys and values of one token. Planes that interleave in
// different steps count as overlapping.
bool Overlap(const RowArray& a, const RowArray& b);

// Two of the arrays that overlap, as indices; nothing when all are apart. Takes n log n, however they interleave in
// equal steps. Of arrays that interleave otherwise 16 n pairs are compared: where that does not do, the next counts as
// an overlap.
std::optional<std::pair<size_t, size_t>> FindOverlap(std::span<const RowArray> arrays);

}  // namespace ashlar::daemon
