// SPDX-License-Identifier: Apache-2.0
// Copies keys and values between stored objects and an engine's pages: landing, gathering, rotating, hashing.
// kernels.h has the rules that hold for every operation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/dtype.h"
#include "kernels/rotation.h"

namespace ashlar::kernels {

// An engine's paged slots of one layer's keys (or values). Strides are in elements. Token position p, head h is at base
// + page_table[p / page_tokens] × page_stride + (p % page_tokens) × token_stride + h × head_stride.
struct PagedSlots {
  void* base = nullptr;
  int64_t page_stride = 0, token_stride = 0, head_stride = 0;
  int32_t page_tokens = 0;
  const int32_t* page_table = nullptr;  // pages of the whole sequence; only entries that are touched are read
  DType dtype = DType::kF32;
  // 8-bit types: one factor per token and head, addressed like the rows. Null: no scaling.
  float* scales = nullptr;
  int64_t scale_page_stride = 0, scale_token_stride = 0, scale_head_stride = 0;
};

// Keys or values as an object stores them: units of `unit_tokens` tokens, each unit dense [unit_tokens, heads, dim].
// The last unit may be partly filled.
struct StoredRows {
  const void* const* units = nullptr;    // [ceil(tokens / unit_tokens)]
  const float* const* scales = nullptr;  // 8-bit types: [units] → [unit_tokens, heads], or null
  int32_t unit_tokens = 0;
  int64_t tokens = 0;
  int32_t heads = 0;
  int32_t dim = 0;
  DType dtype = DType::kF32;
};

// Rotates keys by `delta` positions (HYPIC equation 8): K_b = R(b − a) K_a. In place when source == target. 16-bit and
// 8-bit keys are rotated in fp32 and rounded once. 8-bit rows with scales get new scales, which map the row's largest
// magnitude to the type's largest number (TurnedScale); without scales, a number beyond the range becomes the largest
// number. Without rotation (none defined, or a distance of 0, and no scale), rows and scales are copied bit by bit.
// `positions` and `scaled` are for back ends in CPU memory; others refuse them.
struct RotateKeysArgs {
  Rotation rotation;
  int64_t delta = 0;
  int64_t rows = 0;  // keys, each `dim` long
  int32_t dim = 0;
  DType dtype = DType::kF32;
  const void* source = nullptr;          // [rows, dim]
  void* target = nullptr;                // [rows, dim]
  const float* source_scales = nullptr;  // 8-bit types: [rows], or null
  float* target_scales = nullptr;        // [rows], where source_scales is given
  // [rows / rows_per_position]: additional rotation of each run of rows beyond `delta`. Null: none.
  const int64_t* positions = nullptr;
  int64_t rows_per_position = 1;  // heads of a token
  bool scaled = false;  // rotated dimensions are multiplied by the rotation's scale: keys leave their raw form
};

// The new scale of an 8-bit row: its numbers, rotated but not yet scaled, have magnitudes up to `largest`. A row of
// zeros keeps its scale.
constexpr float TurnedScale(DType dtype, float scale, float largest) {
  return largest == 0 ? scale : std::max(scale * largest / LargestFinite(dtype), std::numeric_limits<float>::min());
}

// Copies stored rows into paged slots of the same dtype, rotating keys by `delta` on the way (like RotateKeys), and
// hashes the source bytes in the same pass so that the verified bytes are the written ones. Without a rotation, or if
// delta = 0, rows and scales are copied bit by bit.
struct LandArgs {
  StoredRows source;
  Rotation rotation;  // kNone for values
  int64_t delta = 0;  // first position of the segment
  PagedSlots target;
  int64_t first_position = 0;  // position of the first stored token in the sequence
  // Out, one per unit (see ChecksumArgs), of rows; and of scales, if any. Null: do not hash.
  uint64_t* unit_checksums = nullptr;
  uint64_t* scale_checksums = nullptr;
  int64_t batch_bytes = 0;
};

// Gathers paged slots into stored rows of the same dtype, hashing the written bytes: the copy made by publishing.
struct GatherArgs {
  PagedSlots source;  // base is only read
  int64_t first_position = 0;
  void* const* units = nullptr;    // out; padding of a partly filled last unit is neither changed nor hashed
  float* const* scales = nullptr;  // out, where the source has scales
  int32_t unit_tokens = 0;
  int64_t tokens = 0;
  int32_t heads = 0;
  int32_t dim = 0;
  uint64_t* unit_checksums = nullptr;   // out, one a unit; null: do not hash
  uint64_t* scale_checksums = nullptr;  // out, one a unit, of scales; null: do not hash
  int64_t batch_bytes = 0;
};

// Hashes units, and copies them on the way if `target` is given. A unit's checksum is XXH3-64 (seed 0) of its bytes.
struct ChecksumArgs {
  std::span<const void* const> units;
  size_t unit_bytes = 0;               // bytes of each unit except the last
  size_t last_unit_bytes = 0;          // bytes of the last unit
  void* const* target = nullptr;       // null: only hash
  uint64_t* unit_checksums = nullptr;  // out, one per unit
  int64_t batch_bytes = 0;
};

// A part's checksum: XXH3-64 of its units' checksums as little-endian words. Two levels, so that units can be hashed
// in any order, by any number of threads, on either side of a bus.
uint64_t CombineChecksums(std::span<const uint64_t> unit_checksums);

}  // namespace ashlar::kernels
