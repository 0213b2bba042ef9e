// SPDX-License-Identifier: Apache-2.0
// Attention's two products on vectors: queries times keys, and weights times values. Included once for every target of
// Highway.
#if defined(ASHLAR_KERNELS_HOST_ATTENTION_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_ATTENTION_PRODUCTS_INL_H_
#undef ASHLAR_KERNELS_HOST_ATTENTION_PRODUCTS_INL_H_
#else
#define ASHLAR_KERNELS_HOST_ATTENTION_PRODUCTS_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/host/attention/key_block-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {
namespace attention {

using Tag = hn::ScalableTag<float>;
using Vec = hn::Vec<Tag>;
inline constexpr size_t kLanes = hn::MaxLanes(Tag());
// Tiles of products that are held in registers: 32 registers with AVX-512 and Neon, otherwise 16.
inline constexpr bool kManyRegisters = kLanes >= 16 || HWY_TARGET == HWY_NEON;
inline constexpr size_t kRowTile = kManyRegisters ? 4 : 2;
inline constexpr size_t kKeyTile = 4;
inline constexpr size_t kVecs = 4;
// Number of key or value vectors multiplied per prefetch step: a step takes as long as a few multiplications.
inline constexpr size_t kVecsOfStep = 8;

constexpr size_t RoundUp(size_t n, size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

#if HWY_TARGET != HWY_SCALAR
// to[0 … 3] ← the sum of a vector's blocks of four lanes.
template <class D>
HWY_INLINE void StoreSumOfBlocks(D d, hn::Vec<D> blocks, float* to) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    hn::StoreU(blocks, d, to);
  } else {
    const hn::Half<D> half;
    StoreSumOfBlocks(half, hn::Add(hn::LowerHalf(half, blocks), hn::UpperHalf(half, blocks)), to);
  }
}
#endif

// to[0 … 3] ← the sums of four vectors' lanes.
HWY_INLINE void StoreSums(Vec a, Vec b, Vec c, Vec e, float* to) {
#if HWY_TARGET == HWY_SCALAR
  const Vec sums[] = {a, b, c, e};
  for (size_t i = 0; i < 4; ++i) to[i] = hn::GetLane(sums[i]);
#else
  const Tag d;
  const hn::Repartition<uint64_t, Tag> pairs;
  const auto ab = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
  const auto ce = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e)));
  // In each block of four lanes: the sums of that block's lanes of a, b, c, e.
  StoreSumOfBlocks(
      d,
      hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, ab, ce)), hn::BitCast(d, hn::InterleaveUpper(pairs, ab, ce))),
      to);
#endif
}

// sums += the products of a tile of queries with four keys, over `dims` dimensions.
HWY_INLINE void AddScores(const float* q, size_t stride, const float* const* keys, size_t dims, Prefetcher& ahead,
                          Vec (&sums)[kRowTile][kKeyTile]) {
  const Tag d;
  for (size_t i = 0; i < dims; i += kLanes) {
    if (i % (kVecsOfStep * kLanes) == 0) ahead.Step();
    Vec key[kKeyTile];
    for (size_t j = 0; j < kKeyTile; ++j) key[j] = hn::LoadU(d, keys[j] + i);
    for (size_t r = 0; r < kRowTile; ++r) {
      const Vec query = hn::LoadU(d, q + r * stride + i);
      for (size_t j = 0; j < kKeyTile; ++j) sums[r][j] = hn::MulAdd(query, key[j], sums[r][j]);
    }
  }
}

// A tile of rows, kVecs vectors wide: out ← factor × out + Σ weight × value.
HWY_INLINE void AddValues(const float* weights, const float* factors, const float* const* values, size_t keys,
                          size_t column, Prefetcher& ahead, float* out, size_t stride) {
  const Tag d;
  Vec sums[kRowTile][kVecs];
  for (size_t r = 0; r < kRowTile; ++r) {
    for (size_t v = 0; v < kVecs; ++v) {
      sums[r][v] = hn::Mul(hn::LoadU(d, out + r * stride + v * kLanes), hn::Set(d, factors[r]));
    }
  }
  for (size_t j = 0; j < keys; ++j) {
    if (j % kVecsOfStep == 0) ahead.Step();
    Vec value[kVecs];
    for (size_t v = 0; v < kVecs; ++v) value[v] = hn::LoadU(d, values[j] + column + v * kLanes);
    for (size_t r = 0; r < kRowTile; ++r) {
      const Vec weight = hn::Set(d, weights[r * kMaxBlock + j]);
      for (size_t v = 0; v < kVecs; ++v) sums[r][v] = hn::MulAdd(weight, value[v], sums[r][v]);
    }
  }
  for (size_t r = 0; r < kRowTile; ++r) {
    for (size_t v = 0; v < kVecs; ++v) hn::StoreU(sums[r][v], d, out + r * stride + v * kLanes);
  }
}

}  // namespace attention
}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();
#endif  // per-target guard
