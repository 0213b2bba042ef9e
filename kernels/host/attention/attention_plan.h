// SPDX-License-Identifier: Apache-2.0
// The division of one attention call. A unit is a block of query tokens with all their heads, so that keys are read
// once; the heads of a token are adjacent, as in a page. A part is a unit's work on a chunk of the keys; the parts of a
// unit are merged by their maxima and sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/host/simd/tiles.h"

namespace ashlar::kernels::host {

// The position to which the pages' keys are rotated.
enum class KeysStand : uint8_t { kLanded, kUnrotated, kZeroBased };

struct AttendPlan {
  AttendPlan(const AttendArgs& its_args, KeysStand its_stand, int64_t threads) : args(its_args), stand(its_stand) {
    // Enough rows to make loading a block of keys worthwhile, but not so many that they fill the cache.
    constexpr int64_t kRows = 64;
    // Enough keys that a part outweighs the cost of rotating the query, of merging and of its tables of angles.
    constexpr int64_t kLeastKeys = 512;
    constexpr int64_t kPartsPerThread = 4;
    block_tokens = std::clamp<int64_t>(kRows / group(), 1, std::max<int64_t>(args.tokens, 1));
    units = (args.tokens + block_tokens - 1) / block_tokens;
    const int64_t rows = block_tokens * group();
    tiles = rows >= int64_t{kTileRows} && HasTiles();
    const int64_t whole = tiles ? int64_t{kTileRows} : kTile;
    head_rows = (rows + whole - 1) / whole * whole;
    for (const KeySpan& span : args.spans) keys += span.tokens;
    if (threads > 1 && units > 0 && units < kPartsPerThread * threads) {
      chunks = std::clamp<int64_t>(kPartsPerThread * threads / units, 1, std::max<int64_t>(keys / kLeastKeys, 1));
    }
    chunk_keys = (keys + chunks - 1) / chunks;
  }

  int64_t group() const { return args.shape.query_heads / args.shape.kv_heads; }
  // Later blocks of tokens see more keys, so they are started first.
  int64_t FirstToken(int64_t unit) const { return (units - 1 - unit) * block_tokens; }
  int64_t TokenCount(int64_t unit) const { return std::min(block_tokens, args.tokens - FirstToken(unit)); }
  int64_t Rows() const { return args.shape.kv_heads * head_rows; }

  // Rows of one kv head are padded to whole tiles of the products, whatever the width of vectors; on the matrix unit to
  // its own tiles.
  static constexpr int64_t kTile = 4;

  const AttendArgs& args;
  const KeysStand stand;
  int64_t block_tokens = 1, units = 0;
  int64_t head_rows = 0;
  // Whether products use the matrix unit: not if there are too few rows to fill its tiles, or vectors are narrower than
  // tiles.
  bool tiles = false;
  int64_t keys = 0, chunks = 1, chunk_keys = 0;  // sums over all spans, concatenated
};

// The result of one part: rows are [kv heads][head_rows], of which the first are a unit's tokens, each with its query
// heads.
struct PartialRows {
  const float* largest;  // [rows], the largest score; −∞ if nothing was visible
  const float* sum;      // [rows], Σ e^{score − largest}
  const float* out;      // [rows], Σ e^{score − largest} value
  int64_t out_stride;
};

}  // namespace ashlar::kernels::host
