// SPDX-License-Identifier: Apache-2.0
// Products of matrices on a processor's matrix unit (Intel AMX), which multiplies bf16 and sums in fp32.
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
// The rows and columns of the sums made at a time, and the width of a panel: two tiles by two.
constexpr size_t kTileBlock = 32;
constexpr size_t kMaxTileParts = 3;

constexpr size_t TileBlocks(size_t n) {
  return (n + kTileBlock - 1) / kTileBlock;
}
constexpr size_t TileSteps(size_t depth) {
  return (depth + kTileDepth - 1) / kTileDepth;
}
// Numbers of one step in depth of a block, in so many parts.
constexpr size_t TileStepNumbers(size_t parts) {
  return 2 * parts * kTileNumbers;
}
// Products of parts that make one of a transition in so many parts with a panel: those that are left out are below 2⁻²⁴
// of the whole.
constexpr size_t TileProducts(size_t parts) {
  return parts == 3 ? 6 : parts == 2 ? 5 : 3;
}

// Returns whether products may run on the unit: the processor has one, the kernel lets the process use it (it is asked
// once), and no test has turned it off.
bool HasTiles();
// Tests turn it off in order to run vectors where there is a unit.
void AllowTiles(bool allow);

// sum ← addend + T x, x and sum being kTileBlock columns, or sum ← addend + x T, x and sum being kTileBlock rows.
// Both operands are parts, of which the first is the largest, aligned to 64 bytes, in the order in which they are read:
//   transition [blocks][steps][parts][2 tiles]
//   panel      [steps][kMaxTileParts][2 tiles]
// where a block is kTileBlock of T's rows, or of its columns where T stands on the right. A tile of the left operand is
// [16 rows][32 depths], of the right one [16 pairs of depths][16 columns][2 depths]; both pair the same depths.
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
// `ahead` fetches blocks × steps × TileProducts(parts) times.
void AddTileProduct(const TileProduct& product, AheadTuple& ahead);

}  // namespace ashlar::kernels::host
