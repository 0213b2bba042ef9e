// SPDX-License-Identifier: Apache-2.0
// Attention's two products on the matrix unit (tiles.h), for a block of kMaxBlock keys of one head: scores as keys
// times queries, and weights times values. Included once for every target of Highway.
#if defined(ASHLAR_KERNELS_HOST_ATTENTION_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_ATTENTION_TILES_INL_H_
#undef ASHLAR_KERNELS_HOST_ATTENTION_TILES_INL_H_
#else
#define ASHLAR_KERNELS_HOST_ATTENTION_TILES_INL_H_
#endif

#include <cstddef>

#include "kernels/host/attention/key_block-inl.h"
#include "kernels/host/simd/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {
namespace attention {

static_assert(kMaxBlock == kTileBlock);

// kTileBlock rows of `columns` numbers, a multiple of kLanes, as a left operand. `ahead` advances kTileBlock steps per
// depth.
template <class E>
HWY_NOINLINE void SplitRowsLeft(const std::byte* const* rows, size_t columns, Prefetcher& ahead,
                                uint16_t* HWY_RESTRICT to) {
  for (size_t k = 0; k < columns; k += kTileDepth, to += TileStepNumbers(kTileParts<E>)) {
    for (size_t i = 0; i < kTileBlock; ++i) {
      ahead.Step();
      const auto* HWY_RESTRICT row = reinterpret_cast<const typename E::Stored*>(rows[i]) + k;
      const Vec high = k + kLanes < columns ? E::Load(row + kLanes) : hn::Zero(Tag());
      SplitPairs<kTileParts<E>>(E::Load(row), high, to + i * kTileDepth, TileStepNumbers(1));
    }
  }
}

// The same, with `columns` a multiple of kTileBlock, as a right operand of depth kTileDepth. `ahead` advances kTileRows
// steps per block of columns.
template <class E>
HWY_NOINLINE void SplitRowsRight(const std::byte* const* rows, size_t columns, Prefetcher& ahead,
                                 uint16_t* HWY_RESTRICT to) {
  for (size_t c = 0; c < columns; c += kTileBlock, to += TileStepNumbers(kTileParts<E>)) {
    for (size_t i = 0; i < kTileRows; ++i) {
      ahead.Step();
      const auto* HWY_RESTRICT low = reinterpret_cast<const typename E::Stored*>(rows[i]) + c;
      const auto* HWY_RESTRICT high = reinterpret_cast<const typename E::Stored*>(rows[i + kTileRows]) + c;
      for (size_t tile = 0; tile < 2; ++tile) {
        SplitPairs<kTileParts<E>>(E::Load(low + tile * kLanes), E::Load(high + tile * kLanes),
                                  to + tile * kTileNumbers + i * kTileDepth, TileStepNumbers(1));
      }
    }
  }
}

// fn(an element type).
template <typename Fn>
HWY_INLINE void WithStored(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kF16:
      return fn(F16());
    case DType::kBF16:
      return fn(BF16());
    case DType::kF8E4M3:
      return fn(Element<DType::kF8E4M3>());
    case DType::kF8E5M2:
      return fn(Element<DType::kF8E5M2>());
    default:
      return fn(F32());
  }
}

// Queries of one head, `rows` of `columns` floats, as right operands, panel after panel with `steps` each, starting
// with step `first`.
inline void SplitQueries(const float* q, size_t stride, size_t rows, size_t columns, size_t first, size_t steps,
                         uint16_t* HWY_RESTRICT to) {
  HWY_ALIGN uint16_t tile[kMaxTileParts * TileStepNumbers(1)];
  for (size_t r = 0; r < rows; r += kTileRows) {
    uint16_t* HWY_RESTRICT panel =
        to + (r / kTileBlock * steps + first) * TileStepNumbers(kMaxTileParts) + r / kTileRows % 2 * kTileNumbers;
    for (size_t k = 0; k < columns; k += kTileDepth, panel += TileStepNumbers(kMaxTileParts)) {
      SplitLeftTile<F32>({q + r * stride + k, stride, rows - r, columns - k}, tile);
      for (size_t part = 0; part < kMaxTileParts; ++part) {
        // Pairs are moved as if they were numbers.
        Transpose(reinterpret_cast<const float*>(tile + part * TileStepNumbers(1)), kTileRows, kTileRows, kTileRows,
                  reinterpret_cast<float*>(panel + part * TileStepNumbers(1)), kTileRows);
      }
    }
  }
}

}  // namespace attention
}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();
#endif  // per-target guard
