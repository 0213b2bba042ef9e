// SPDX-License-Identifier: Apache-2.0
// The three products that decoding from buffers is made of. Rows of matrices are whole vectors long (padded with zeros)
// and may lie anywhere. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_PRODUCTS_INL_H_
#undef ASHLAR_KERNELS_HOST_PRODUCTS_INL_H_
#else
#define ASHLAR_KERNELS_HOST_PRODUCTS_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <utility>

#include "hwy/highway.h"
#include "kernels/host/simd/matrix-inl.h"
#include "kernels/host/simd/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// Sums that are held in registers at a time.
constexpr size_t kSums = kLanes >= 16 ? 16 : 8;

// A matrix of any element type; `columns` is a multiple of kLanes.
template <class E>
struct WritableRows {
  typename E::Stored* data;
  size_t stride, rows, columns;
  typename E::Stored* operator[](size_t i) const { return data + i * stride; }
};
using MutableRows = WritableRows<F32>;
// A read-only state.
template <class E>
struct StoredRows {
  const typename E::Stored* data;
  size_t stride, rows, columns;
  const typename E::Stored* operator[](size_t i) const { return data + i * stride; }
};
using ConstRows = StoredRows<F32>;

inline ConstRows Const(const MutableRows& m) {
  return {m.data, m.stride, m.rows, m.columns};
}

constexpr size_t kLine = 64;  // bytes

// Prefetches memory that will be read some microseconds later.
HWY_INLINE void Prefetch(const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// Large matrices are walked in this number of parallel parts, each in memory order.
constexpr size_t kAbreast = 4;

// Software prefetch of the next operand, spread over the current computation: a core can wait for only a few lines at a
// time. The beginnings of all parts are prefetched first, in the order of the later reads.
// Prefetching may end a few lines past `bytes`: a prefetch of an unmapped address reads nothing, and does not fault.
class Upcoming {
 public:
  Upcoming() = default;
  Upcoming(const void* from, size_t bytes)
      : at_(static_cast<const char*>(from)), part_(RoundUp(bytes, kAbreast * kLine) / kAbreast), left_(part_ / kLine) {}

  // Steps take as long as reading a row of a state.
  HWY_INLINE void Fetch(size_t steps) {
    for (due_ += steps; due_ >= kStepsOfLine && left_ > 0; due_ -= kStepsOfLine, --left_, at_ += kLine) {
      for (size_t part = 0; part < kAbreast; ++part) __builtin_prefetch(at_ + part * part_, 0, 2);
    }
  }

 private:
  static constexpr size_t kStepsOfLine = 2;

  const char* at_ = nullptr;  // position in the first part
  size_t part_ = 0;           // bytes
  size_t left_ = 0;           // lines of a part that are not prefetched yet
  size_t due_ = 0;            // steps
};
HWY_INLINE void Fetch(Upcoming* upcoming, size_t steps = 1) {
  if (upcoming != nullptr) upcoming->Fetch(steps);
}

template <size_t R, size_t N, class E>
HWY_INLINE void AddProductBlock(const float* HWY_RESTRICT x, size_t x_stride, StoredRows<E> m, size_t column,
                                float* HWY_RESTRICT out, size_t out_stride) {
  const Tag d;
  Vec sums[R][N];
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) sums[r][n] = hn::LoadU(d, out + r * out_stride + column + n * kLanes);
  }
  for (size_t i = 0; i < m.rows; ++i) {
    const auto* HWY_RESTRICT row = m[i] + column;
    Vec vecs[N];
    for (size_t n = 0; n < N; ++n) vecs[n] = E::Load(row + n * kLanes);
    for (size_t r = 0; r < R; ++r) {
      const Vec factor = hn::Set(d, x[r * x_stride + i]);
      for (size_t n = 0; n < N; ++n) sums[r][n] = hn::MulAdd(factor, vecs[n], sums[r][n]);
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) hn::StoreU(sums[r][n], d, out + r * out_stride + column + n * kLanes);
  }
}

template <size_t R, class E>
HWY_INLINE void AddProductRows(const float* HWY_RESTRICT x, size_t x_stride, StoredRows<E> m, float* HWY_RESTRICT out,
                               size_t out_stride) {
  constexpr size_t kWide = std::min<size_t>(8, kSums / R);
  size_t column = 0;
  for (; column + kWide * kLanes <= m.columns; column += kWide * kLanes) {
    AddProductBlock<R, kWide>(x, x_stride, m, column, out, out_stride);
  }
  for (; column < m.columns; column += kLanes) AddProductBlock<R, 1>(x, x_stride, m, column, out, out_stride);
}

// kAbreast streams keep several hardware prefetchers busy; this reaches read bandwidth. Sums stay in the nearest cache
// meanwhile.
template <size_t R, class E>
HWY_INLINE void AddProductAbreast(const float* HWY_RESTRICT x, size_t x_stride, StoredRows<E> m,
                                  float* HWY_RESTRICT out, size_t out_stride) {
  const Tag d;
  const size_t part = m.rows / kAbreast;
  for (size_t i = 0; i < part; ++i) {
    Vec factors[R][kAbreast];
    for (size_t r = 0; r < R; ++r) {
      for (size_t k = 0; k < kAbreast; ++k) factors[r][k] = hn::Set(d, x[r * x_stride + k * part + i]);
    }
    for (size_t column = 0; column < m.columns; column += kLanes) {
      Vec vecs[kAbreast];
      for (size_t k = 0; k < kAbreast; ++k) vecs[k] = E::Load(m[k * part + i] + column);
      for (size_t r = 0; r < R; ++r) {
        Vec sum = hn::LoadU(d, out + r * out_stride + column);
        for (size_t k = 0; k < kAbreast; ++k) sum = hn::MulAdd(factors[r][k], vecs[k], sum);
        hn::StoreU(sum, d, out + r * out_stride + column);
      }
    }
  }
}

// fn.operator()<R>(r) for rows [0, count), R of them at a time from r on.
template <typename Fn>
HWY_INLINE void InRunsOfRows(size_t count, const Fn& fn) {
  size_t r = 0;
  for (; r + 8 <= count; r += 8) fn.template operator()<8>(r);
  if (r + 4 <= count) fn.template operator()<4>(std::exchange(r, r + 4));
  if (r + 2 <= count) fn.template operator()<2>(std::exchange(r, r + 2));
  if (r < count) fn.template operator()<1>(r);
}

// out[r, :] += Σ_i x[r, i] m[i, :], of a matrix in the nearest cache.
template <class E>
HWY_INLINE void AddProduct(const float* HWY_RESTRICT x, size_t x_stride, size_t x_rows, StoredRows<E> m,
                           float* HWY_RESTRICT out, size_t out_stride) {
  InRunsOfRows(x_rows, [&]<size_t R>(size_t r) HWY_ATTR {
    AddProductRows<R>(x + r * x_stride, x_stride, m, out + r * out_stride, out_stride);
  });
}

// The same of one in memory.
template <class E>
HWY_INLINE void AddLargeProduct(const float* HWY_RESTRICT x, size_t x_stride, size_t x_rows, StoredRows<E> m,
                                float* HWY_RESTRICT out, size_t out_stride) {
  InRunsOfRows(x_rows, [&]<size_t R>(size_t r) HWY_ATTR {
    AddProductAbreast<R>(x + r * x_stride, x_stride, m, out + r * out_stride, out_stride);
  });
  const size_t abreast = m.rows / kAbreast * kAbreast;
  if (abreast == m.rows) return;
  AddProduct(x + abreast, x_stride, x_rows, StoredRows<E>{m[abreast], m.stride, m.rows - abreast, m.columns}, out,
             out_stride);
}

// For rows j, j + apart, … of m.
template <size_t R, size_t J, class E>
HWY_INLINE void DotBlock(const float* HWY_RESTRICT x, size_t x_stride, StoredRows<E> m, size_t j, size_t apart,
                         float* HWY_RESTRICT out, size_t out_stride) {
  const Tag d;
  Vec sums[R][J];
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < J; ++n) sums[r][n] = hn::Zero(d);
  }
  for (size_t i = 0; i < m.columns; i += kLanes) {
    Vec rows[J];
    for (size_t n = 0; n < J; ++n) rows[n] = E::Load(m[j + n * apart] + i);
    for (size_t r = 0; r < R; ++r) {
      const Vec factor = hn::LoadU(d, x + r * x_stride + i);
      for (size_t n = 0; n < J; ++n) sums[r][n] = hn::MulAdd(factor, rows[n], sums[r][n]);
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < J; ++n) out[r * out_stride + j + n * apart] += hn::GetLane(hn::SumOfLanes(d, sums[r][n]));
  }
}

template <size_t J, class E>
HWY_INLINE void DotRows(const float* HWY_RESTRICT x, size_t x_stride, size_t x_rows, StoredRows<E> m, size_t j,
                        size_t apart, float* HWY_RESTRICT out, size_t out_stride) {
  size_t r = 0;
  for (; r + 2 <= x_rows; r += 2) {
    DotBlock<2, J>(x + r * x_stride, x_stride, m, j, apart, out + r * out_stride, out_stride);
  }
  if (r < x_rows) DotBlock<1, J>(x + r * x_stride, x_stride, m, j, apart, out + r * out_stride, out_stride);
}

// out[r, j] += Σ_i x[r, i] m[j, i]. Four parts of m are walked in parallel.
template <class E>
HWY_INLINE void AddDots(const float* HWY_RESTRICT x, size_t x_stride, size_t x_rows, StoredRows<E> m,
                        float* HWY_RESTRICT out, size_t out_stride) {
  const size_t part = m.rows / kAbreast;
  for (size_t j = 0; j < part; ++j) DotRows<kAbreast>(x, x_stride, x_rows, m, j, part, out, out_stride);
  for (size_t j = part * kAbreast; j < m.rows; ++j) DotRows<1>(x, x_stride, x_rows, m, j, 1, out, out_stride);
}

// The kind of factors that scale a matrix before the sum: one per row, or one per column.
enum class Scale { kByRow, kByColumn };

template <Scale kScale, size_t R, size_t N, class E>
HWY_INLINE void AddOuterBlock(const float* HWY_RESTRICT scale, const float* HWY_RESTRICT a, size_t a_stride,
                              ConstRows b, WritableRows<E> m, size_t i, size_t column) {
  const Tag d;
  Vec sums[R][N];
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) {
      const Vec factor = kScale == Scale::kByRow ? hn::Set(d, scale[i + r]) : hn::LoadU(d, scale + column + n * kLanes);
      sums[r][n] = hn::Mul(factor, E::Load(m[i + r] + column + n * kLanes));
    }
  }
  for (size_t t = 0; t < b.rows; ++t) {
    const float* HWY_RESTRICT row = b[t] + column;
    Vec vecs[N];
    for (size_t n = 0; n < N; ++n) vecs[n] = hn::LoadU(d, row + n * kLanes);
    for (size_t r = 0; r < R; ++r) {
      const Vec factor = hn::Set(d, a[t * a_stride + i + r]);
      for (size_t n = 0; n < N; ++n) sums[r][n] = hn::MulAdd(factor, vecs[n], sums[r][n]);
    }
  }
  for (size_t r = 0; r < R; ++r) {
    for (size_t n = 0; n < N; ++n) E::Store(sums[r][n], m[i + r] + column + n * kLanes);
  }
}

template <Scale kScale, size_t R, class E>
HWY_INLINE void AddOuterRows(const float* HWY_RESTRICT scale, const float* HWY_RESTRICT a, size_t a_stride, ConstRows b,
                             WritableRows<E> m, size_t i) {
  constexpr size_t kWide = std::min<size_t>(8, kSums / R);
  size_t column = 0;
  for (; column + kWide * kLanes <= m.columns; column += kWide * kLanes) {
    AddOuterBlock<kScale, R, kWide>(scale, a, a_stride, b, m, i, column);
  }
  for (; column < m.columns; column += kLanes) AddOuterBlock<kScale, R, 1>(scale, a, a_stride, b, m, i, column);
}

// Returns the time of a row to which `terms` are added, in reads of a row.
constexpr size_t StepsOfOuterRow(size_t terms) {
  return 1 + terms / 8;
}

// m[i, :] ← scale ⊙ m[i, :] + Σ_t a[t, i] b[t, :].
template <Scale kScale, class E>
HWY_INLINE void AddOuter(const float* HWY_RESTRICT scale, const float* HWY_RESTRICT a, size_t a_stride, ConstRows b,
                         WritableRows<E> m, Upcoming* upcoming = nullptr) {
  size_t i = 0;
  for (; i + 2 <= m.rows; i += 2) {
    Fetch(upcoming, 2 * StepsOfOuterRow(b.rows));
    AddOuterRows<kScale, 2>(scale, a, a_stride, b, m, i);
  }
  if (i < m.rows) AddOuterRows<kScale, 1>(scale, a, a_stride, b, m, i);
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
