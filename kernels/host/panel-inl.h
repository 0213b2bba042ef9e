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

// LoadPanel from memory that holds the transpose: column j of the panel lies at from + j * stride.
HWY_INLINE void LoadPanelTransposed(const float* HWY_RESTRICT from, size_t stride, size_t rows, size_t columns,
                                    float* HWY_RESTRICT panel) {
  if (columns < kWidth) std::fill(panel, panel + rows * kWidth, 0.0f);
  Transpose(from, stride, rows, columns, panel, kWidth);
  std::fill(panel + rows * kWidth, panel + RoundUp(rows, kRows) * kWidth, 0.0f);
}

HWY_INLINE void StorePanelTransposed(const float* HWY_RESTRICT panel, size_t rows, size_t columns,
                                     float* HWY_RESTRICT to, size_t stride) {
  Transpose(panel, kWidth, columns, rows, to, stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
