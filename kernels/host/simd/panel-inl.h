// SPDX-License-Identifier: Apache-2.0
// Panels, and the product on vectors that everything in linear.cc is made of but matrices on the matrix unit
// (tiles-inl.h). Included once for every target of Highway.
//
// A matrix in scratch memory is divided into panels of kWidth columns. A panel is dense, [rows][kWidth], aligned, and
// padded with zeros: rows up to a multiple of kRows, columns up to kWidth. So products have no remainder, and no two
// rows of a panel compete for one set of the cache.

#if defined(ASHLAR_KERNELS_HOST_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_PANEL_INL_H_
#undef ASHLAR_KERNELS_HOST_PANEL_INL_H_
#else
#define ASHLAR_KERNELS_HOST_PANEL_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<float>;
using Vec = hn::Vec<Tag>;

constexpr size_t kLanes = hn::MaxLanes(Tag());
// The block of a product that is held in registers, kRows × kVecs vectors: of 32 registers with AVX-512, otherwise of
// 16.
constexpr size_t kRows = kLanes >= 16 ? 8 : 4;
constexpr size_t kVecs = kLanes >= 16 ? 2 : 3;
constexpr size_t kWidth = kVecs * kLanes;

constexpr size_t RoundUp(size_t n, size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// kRows rows of a panel's first N vectors, in registers.
template <size_t N>
struct Block {
  Vec v[kRows][N];

  HWY_INLINE void SetZero() {
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t n = 0; n < N; ++n) v[r][n] = hn::Zero(Tag());
    }
  }
  HWY_INLINE void Load(const float* HWY_RESTRICT panel) {
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t n = 0; n < N; ++n) v[r][n] = hn::Load(Tag(), panel + r * kWidth + n * kLanes);
    }
  }
  HWY_INLINE void Store(float* HWY_RESTRICT panel) const {
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t n = 0; n < N; ++n) hn::Store(v[r][n], Tag(), panel + r * kWidth + n * kLanes);
    }
  }
  // Row r ← scale[r] × row r.
  HWY_INLINE void Scale(const float* HWY_RESTRICT scale) {
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t n = 0; n < N; ++n) v[r][n] = hn::Mul(hn::Set(Tag(), scale[r]), v[r][n]);
    }
  }
};

// The order of the left operand: element (row, k) is at a[row * lda + k], or at a[k * lda + row].
enum class Left { kRowMajor, kColumnMajor };

// c += A B for kRows rows of A, `depth` deep, and a panel B.
template <Left kLeft, size_t N>
HWY_INLINE void Accumulate(Block<N>& c, const float* HWY_RESTRICT a, size_t lda, const float* HWY_RESTRICT b,
                           size_t depth) {
  for (size_t k = 0; k < depth; ++k) {
    Vec row[N];
    for (size_t n = 0; n < N; ++n) row[n] = hn::Load(Tag(), b + k * kWidth + n * kLanes);
    for (size_t r = 0; r < kRows; ++r) {
      const Vec factor = hn::Set(Tag(), kLeft == Left::kRowMajor ? a[r * lda + k] : a[k * lda + r]);
      for (size_t n = 0; n < N; ++n) c.v[r][n] = hn::MulAdd(factor, row[n], c.v[r][n]);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
