// SPDX-License-Identifier: Apache-2.0
// Products of matrices on a CPU's matrix unit (Intel AMX), which multiplies bf16 and sums in fp32.
//
// A tile is 16 rows of 64 bytes: 16 × 16 sums, or 16 × 32 numbers of bf16. Operands of fp32 are multiplied in parts
// (tiles-inl.h cuts them).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host/simd/ahead.h"

namespace ashlar::kernels::host {

constexpr size_t kTileRows = 16;
constexpr size_t kTileDepth = 32;
constexpr size_t kTileNumbers = kTileRows * kTileDepth;
// The rows and columns of the sums computed at a time, and the width of a panel: two tiles by two.
constexpr size_t kTileBlock = 32;
constexpr size_t kMaxTileParts = 3;

constexpr size_t TileBlocks(size_t n) {
  return (n + kTileBlock - 1) / kTileBlock;
}
constexpr size_t TileSteps(size_t depth) {
  return (depth + kTileDepth - 1) / kTileDepth;
}
// Numbers of one depth step of a block, in this number of parts.
constexpr size_t TileStepNumbers(size_t parts) {
  return 2 * parts * kTileNumbers;
}
// Number of products of parts for a transition in this number of parts with a panel: omitted ones are below 2⁻²⁴ of the
// whole.
constexpr size_t TileProducts(size_t parts) {
  return parts == 3 ? 6 : parts == 2 ? 5 : 3;
}

// Returns whether products may run on the unit: the CPU has one, the kernel allows the process to use it (asked once),
// and no test has turned it off.
bool HasTiles();
// Tests turn it off to run vectors on a machine with the unit.
void AllowTiles(bool allow);

// sum ← addend + T x, where x and sum are kTileBlock columns, or sum ← addend + x T, where x and sum are kTileBlock
// rows. Both operands are parts, the largest first, aligned to 64 bytes, in reading order:
//   transition [blocks][steps][parts][2 tiles]
//   panel      [steps][kMaxTileParts][2 tiles]
// where a block is kTileBlock of T's rows, or of its columns if T is on the right. A tile of the left operand is [16
// rows][32 depths], of the right one [16 pairs of depths][16 columns][2 depths]; both pair the same depths.
struct TileProduct {
  const uint16_t* transition;
  size_t parts;  // parts of the transition
  bool transition_left;
  bool half_panel;  // the panel is one tile wide instead of two
  size_t blocks, steps;
  const uint16_t* panel;
  const float* addend;  // may be the sum; strides are in floats, from row to row
  size_t addend_stride;
  float* sum;
  size_t sum_stride;
};
// `ahead` prefetches blocks × steps × TileProducts(parts) times.
void AddTileProduct(const TileProduct& product, AheadTuple& ahead);

}  // namespace ashlar::kernels::host
