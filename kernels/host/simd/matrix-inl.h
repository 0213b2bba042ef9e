// SPDX-License-Identifier: Apache-2.0
// The caller's matrices on their way in and out of panels: element types, both orders. Numbers are widened to fp32 when
// they are read, and rounded once to nearest even when they are written. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_MATRIX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_MATRIX_INL_H_
#undef ASHLAR_KERNELS_HOST_MATRIX_INL_H_
#else
#define ASHLAR_KERNELS_HOST_MATRIX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "kernels/host/simd/element-inl.h"
#include "kernels/host/simd/panel-inl.h"
#include "kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// An element type. Load and Store move kLanes numbers, which need not be aligned.
template <DType kType>
struct Element {
  static constexpr bool kIsF32 = kType == DType::kF32;
  using Stored = host::HWY_NAMESPACE::Stored<kType>;
  static HWY_INLINE Vec Load(const Stored* from) { return LoadElements<kType>(Tag(), from); }
  static HWY_INLINE void Store(Vec v, Stored* to) { StoreElements<kType, false>(v, Tag(), to); }
};
using F32 = Element<DType::kF32>;
using F16 = Element<DType::kF16>;
using BF16 = Element<DType::kBF16>;

// fn(F32()), fn(F16()) or fn(BF16()).
template <typename Fn>
HWY_INLINE auto WithElements(DType dtype, const Fn& fn) {
  if (dtype == DType::kF16) return fn(F16());
  return dtype == DType::kBF16 ? fn(BF16()) : fn(F32());
}
template <class E>
const typename E::Stored* Elements(const void* array, size_t index = 0) {
  return static_cast<const typename E::Stored*>(array) + index;
}
template <class E>
typename E::Stored* Elements(void* array, size_t index = 0) {
  return static_cast<typename E::Stored*>(array) + index;
}

// The first `count` < kLanes numbers of a vector, the others zero.
template <class E>
HWY_INLINE Vec LoadPart(const typename E::Stored* from, size_t count) {
  HWY_ALIGN typename E::Stored part[kLanes] = {};
  std::copy_n(from, count, part);
  return E::Load(part);
}
template <class E>
HWY_INLINE void StorePart(Vec v, typename E::Stored* to, size_t count) {
  HWY_ALIGN typename E::Stored part[kLanes];
  E::Store(v, part);
  std::copy_n(part, count, to);
}

// to[i] ← scale × from[i] for i < n, in fp32.
template <class E>
HWY_INLINE void Widen(const typename E::Stored* HWY_RESTRICT from, size_t n, float scale, float* HWY_RESTRICT to) {
  const Vec factor = hn::Set(Tag(), scale);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(hn::Mul(factor, E::Load(from + i)), Tag(), to + i);
  if (i < n) StorePart<F32>(hn::Mul(factor, LoadPart<E>(from + i, n - i)), to + i, n - i);
}
// The inverse.
template <class E>
HWY_INLINE void Narrow(const float* HWY_RESTRICT from, size_t n, float scale, typename E::Stored* HWY_RESTRICT to) {
  const Vec factor = hn::Set(Tag(), scale);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) E::Store(hn::Mul(factor, hn::LoadU(Tag(), from + i)), to + i);
  if (i < n) StorePart<E>(hn::Mul(factor, LoadPart<F32>(from + i, n - i)), to + i, n - i);
}

// panel ← scale × `rows` rows of `columns` numbers, padded. Row i is at from + i * stride.
template <class E>
HWY_INLINE void LoadPanel(const typename E::Stored* HWY_RESTRICT from, size_t stride, size_t rows, size_t columns,
                          float scale, float* HWY_RESTRICT panel) {
  for (size_t i = 0; i < rows; ++i, panel += kWidth) {
    Widen<E>(from + i * stride, columns == kWidth ? kWidth : columns, scale, panel);
    std::fill(panel + columns, panel + kWidth, 0.0f);
  }
  std::fill(panel, panel + (RoundUp(rows, kRows) - rows) * kWidth, 0.0f);
}
template <class E>
HWY_INLINE void StorePanel(const float* HWY_RESTRICT panel, size_t rows, size_t columns, float scale,
                           typename E::Stored* HWY_RESTRICT to, size_t stride) {
  for (size_t i = 0; i < rows; ++i) {
    Narrow<E>(panel + i * kWidth, columns == kWidth ? kWidth : columns, scale, to + i * stride);
  }
}

// to[i * to_stride + j] ← from[j * from_stride + i] for four i and four j. D has four lanes. The interleaving
// operations are named without hn::, which lacks them for the scalar target: they are looked up when instantiated.
template <class D>
HWY_INLINE void TransposeFour(D d, const float* HWY_RESTRICT from, size_t from_stride, float* HWY_RESTRICT to,
                              size_t to_stride) {
  const auto r0 = hn::LoadU(d, from), r1 = hn::LoadU(d, from + from_stride);
  const auto r2 = hn::LoadU(d, from + 2 * from_stride), r3 = hn::LoadU(d, from + 3 * from_stride);
  const auto low02 = InterleaveLower(d, r0, r2), low13 = InterleaveLower(d, r1, r3);
  const auto high02 = InterleaveUpper(d, r0, r2), high13 = InterleaveUpper(d, r1, r3);
  hn::StoreU(InterleaveLower(d, low02, low13), d, to);
  hn::StoreU(InterleaveUpper(d, low02, low13), d, to + to_stride);
  hn::StoreU(InterleaveLower(d, high02, high13), d, to + 2 * to_stride);
  hn::StoreU(InterleaveUpper(d, high02, high13), d, to + 3 * to_stride);
}

// to[i * to_stride + j] ← from[j * from_stride + i] for i < rows, j < columns.
template <size_t kLanesHere = kLanes>
HWY_INLINE void Transpose(const float* HWY_RESTRICT from, size_t from_stride, size_t rows, size_t columns,
                          float* HWY_RESTRICT to, size_t to_stride) {
  size_t blocked_rows = 0, blocked_columns = 0;
  if constexpr (kLanesHere >= 4) {
    const hn::FixedTag<float, std::min<size_t>(kLanesHere, 4)> four;
    blocked_rows = rows / 4 * 4;
    blocked_columns = columns / 4 * 4;
    for (size_t j = 0; j < blocked_columns; j += 4) {
      for (size_t i = 0; i < blocked_rows; i += 4) {
        TransposeFour(four, from + j * from_stride + i, from_stride, to + i * to_stride + j, to_stride);
      }
    }
  }
  for (size_t j = 0; j < columns; ++j) {
    for (size_t i = j < blocked_columns ? blocked_rows : 0; i < rows; ++i) {
      to[i * to_stride + j] = from[j * from_stride + i];
    }
  }
}

// Rows of a matrix that is transposed are widened this many at a time, so that they stay in the nearest cache.
constexpr size_t kStrip = 4;

// LoadPanel from memory that holds the transpose: column j of the panel is at from + j * stride.
template <class E>
HWY_INLINE void LoadPanelTransposed(const typename E::Stored* HWY_RESTRICT from, size_t stride, size_t rows,
                                    size_t columns, float scale, float* HWY_RESTRICT panel) {
  if (columns < kWidth) std::fill(panel, panel + rows * kWidth, 0.0f);
  HWY_ALIGN float strip[kStrip * kMaxHeadDim];
  for (size_t j = 0; j < columns; j += kStrip) {
    const size_t count = std::min(kStrip, columns - j);
    if constexpr (E::kIsF32) {
      if (scale == 1) {
        Transpose(from + j * stride, stride, rows, count, panel + j, kWidth);
        continue;
      }
    }
    for (size_t c = 0; c < count; ++c) Widen<E>(from + (j + c) * stride, rows, scale, strip + c * kMaxHeadDim);
    Transpose(strip, kMaxHeadDim, rows, count, panel + j, kWidth);
  }
  std::fill(panel + rows * kWidth, panel + RoundUp(rows, kRows) * kWidth, 0.0f);
}
template <class E>
HWY_INLINE void StorePanelTransposed(const float* HWY_RESTRICT panel, size_t rows, size_t columns, float scale,
                                     typename E::Stored* HWY_RESTRICT to, size_t stride) {
  HWY_ALIGN float strip[kStrip * kMaxHeadDim];
  for (size_t j = 0; j < columns; j += kStrip) {
    const size_t count = std::min(kStrip, columns - j);
    Transpose(panel + j, kWidth, count, rows, strip, kMaxHeadDim);
    for (size_t c = 0; c < count; ++c) Narrow<E>(strip + c * kMaxHeadDim, rows, scale, to + (j + c) * stride);
  }
}

// The larger magnitudes, number by number; NaN is not looked at.
HWY_INLINE Vec LargerOf(Vec numbers, Vec largest) {
  const Vec sizes = hn::Abs(numbers);
  return hn::IfThenElse(hn::Gt(sizes, largest), sizes, largest);
}

// The largest magnitude of n numbers and `largest`; NaN is not looked at. Several chains of comparisons, since each has
// to wait for the one before it.
HWY_INLINE Vec LargestOf(const float* HWY_RESTRICT from, size_t n, Vec largest) {
  constexpr size_t kChains = 4;
  Vec chains[kChains];
  for (Vec& chain : chains) chain = hn::Zero(Tag());
  size_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
    for (size_t c = 0; c < kChains; ++c) chains[c] = LargerOf(hn::LoadU(Tag(), from + i + c * kLanes), chains[c]);
  }
  for (; i + kLanes <= n; i += kLanes) chains[0] = LargerOf(hn::LoadU(Tag(), from + i), chains[0]);
  if (i < n) chains[0] = LargerOf(LoadPart<F32>(from + i, n - i), chains[0]);
  for (const Vec chain : chains) largest = LargerOf(chain, largest);
  return largest;
}

// The exponent of an fp16 state with this largest magnitude: the smallest e ≥ 0 with largest ≤ 2^(e + 15).
inline int HalfExponent(float largest) {
  if (!(largest > 0x1p15f) || std::isinf(largest)) return 0;
  int exponent;
  const float mantissa = std::frexp(largest, &exponent);  // in [0.5, 1)
  return (mantissa == 0.5f ? exponent - 1 : exponent) - 15;
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
