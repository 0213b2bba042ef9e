// SPDX-License-Identifier: Apache-2.0
// The division of one call of attention. A unit is a block of query tokens with all their heads, so that keys are read
// once; all heads of a token stand one after another, as they lie in a page. A part is a unit's share of a chunk of the
// keys; parts of a unit are merged by their maxima and sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/host/simd/tiles.h"

namespace ashlar::kernels::host {

// The position to which the pages' keys are turned.
enum class KeysStand : uint8_t { kLanded, kUnrotated, kZeroBased };

struct AttendPlan {
  AttendPlan(const AttendArgs& args, KeysStand stand, int64_t threads) : args(args), stand(stand) {
    // Enough rows for a block of keys to be worth its way to the cache; not so many that they fill it.
    constexpr int64_t kRows = 64;
    // Enough keys for a part to be worth its turn of the query, its merge and its tables of angles.
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
  // Blocks of tokens that come later see more: they are begun first.
  int64_t FirstToken(int64_t unit) const { return (units - 1 - unit) * block_tokens; }
  int64_t TokenCount(int64_t unit) const { return std::min(block_tokens, args.tokens - FirstToken(unit)); }
  int64_t Rows() const { return args.shape.kv_heads * head_rows; }

  // Rows of one kv head are padded to whole tiles of the products, whatever the width of vectors; on the matrix unit to
  // its own.
  static constexpr int64_t kTile = 4;

  const AttendArgs& args;
  const KeysStand stand;
  int64_t block_tokens = 1, units = 0;
  int64_t head_rows = 0;
  // Products are made on the matrix unit, whose tiles fewer rows would leave empty, where vectors are as wide as tiles.
  bool tiles = false;
  int64_t keys = 0, chunks = 1, chunk_keys = 0;  // of all spans, concatenated
};

// The result of one part: rows are [kv heads][head_rows], of which the first are a unit's tokens, each with its query
// heads.
struct PartialRows {
  const float* largest;  // [rows], the largest score; −∞ where nothing was seen
  const float* sum;      // [rows], Σ e^{score − largest}
  const float* out;      // [rows], Σ e^{score − largest} value
  int64_t out_stride;
};

}  // namespace ashlar::kernels::host
