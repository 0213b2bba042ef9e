// SPDX-License-Identifier: Apache-2.0
// RowArray: the rows of one plane (all keys, or all values, of one layer) in an engine's pages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "absl/numeric/int128.h"

namespace ashlar::daemon {

// Offsets and strides are in bytes. Counts and row_bytes are at least 1.
struct RowArray {
  struct Dimension {
    uint64_t stride;
    uint64_t count;
  };
  uint64_t offset;
  uint64_t row_bytes;
  std::array<Dimension, 3> dimensions;  // pages, tokens, heads

  // One past the last byte. 128 bits hold any sum of three 64-bit × 32-bit products.
  absl::uint128 End() const;

  // Returns whether rows are disjoint: ordered from the smallest to the largest stride, each stride covers everything
  // inside.
  bool Disjoint() const;
};

// Returns whether a row of `a` shares a byte with a row of `b`. Both must be Disjoint and end below 2^62. The time
// depends on the number of dimensions, not of rows. The result is exact for separate planes and for planes that
// interleave with equal strides, such as the planes of one page, or keys and values of one token. Planes that
// interleave with different strides count as overlapping.
bool Overlap(const RowArray& a, const RowArray& b);

// Returns the indices of two arrays that overlap; nothing if all are disjoint. Takes n log n for any interleaving with
// equal strides. For other interleavings, 16 n pairs are compared; beyond that, the next one counts as an overlap.
std::optional<std::pair<size_t, size_t>> FindOverlap(std::span<const RowArray> arrays);

}  // namespace ashlar::daemon
