// Panels, and the one product that everything in linear.cc is made of. Included once for every target of Highway.
//
// A matrix in scratch is cut into panels of kWidth columns. A panel is dense, [rows][kWidth], aligned, and padded with
// zeros: rows up to a multiple of kRows, columns up to kWidth. So no product needs a remainder, and no two rows of a
// panel fight for one set of the cache.

#if defined(ASHLAR_KERNELS_HOST_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_PANEL_INL_H_
#undef ASHLAR_KERNELS_HOST_PANEL_INL_H_
#else
#define ASHLAR_KERNELS_HOST_PANEL_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<float>;
using Vec = hn::Vec<Tag>;

constexpr size_t kLanes = hn::MaxLanes(Tag());
// The block of a product that is held in registers, kRows × kVecs vectors: of 32 registers with AVX-512, of 16 else.
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

// How the left operand lies: element (row, k) at a[row * lda + k], or at a[k * lda + row].
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

// panel ← `rows` rows of `columns` floats, padded. Row i lies at from + i * stride.
HWY_INLINE void LoadPanel(const float* HWY_RESTRICT from, size_t stride, size_t rows, size_t columns,
                          float* HWY_RESTRICT panel) {
  for (size_t i = 0; i < rows; ++i) {
    const float* HWY_RESTRICT row = from + i * stride;
    if (columns == kWidth) {
      for (size_t n = 0; n < kVecs; ++n) hn::Store(hn::LoadU(Tag(), row + n * kLanes), Tag(), panel + n * kLanes);
    } else {
      std::fill(std::copy(row, row + columns, panel), panel + kWidth, 0.0f);
    }
    panel += kWidth;
  }
  std::fill(panel, panel + (RoundUp(rows, kRows) - rows) * kWidth, 0.0f);
}

HWY_INLINE void StorePanel(const float* HWY_RESTRICT panel, size_t rows, size_t columns, float* HWY_RESTRICT to,
                           size_t stride) {
  for (size_t i = 0; i < rows; ++i) {
    const float* HWY_RESTRICT row = panel + i * kWidth;
    if (columns == kWidth) {
      for (size_t n = 0; n < kVecs; ++n)
        hn::StoreU(hn::Load(Tag(), row + n * kLanes), Tag(), to + i * stride + n * kLanes);
    } else {
      std::copy(row, row + columns, to + i * stride);
    }
  }
}

// The same with memory holding the transpose: column j of the panel lies at from + j * stride.
HWY_INLINE void LoadPanelTransposed(const float* HWY_RESTRICT from, size_t stride, size_t rows, size_t columns,
                                    float* HWY_RESTRICT panel) {
  std::fill(panel, panel + RoundUp(rows, kRows) * kWidth, 0.0f);
  // A line of each source row at a time, so that it is read whole while it is near.
  constexpr size_t kLine = 16;
  for (size_t line = 0; line < rows; line += kLine) {
    const size_t end = std::min(line + kLine, rows);
    for (size_t j = 0; j < columns; ++j) {
      for (size_t i = line; i < end; ++i) panel[i * kWidth + j] = from[j * stride + i];
    }
  }
}

HWY_INLINE void StorePanelTransposed(const float* HWY_RESTRICT panel, size_t rows, size_t columns,
                                     float* HWY_RESTRICT to, size_t stride) {
  for (size_t j = 0; j < columns; ++j) {
    for (size_t i = 0; i < rows; ++i) to[j * stride + i] = panel[i * kWidth + j];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
