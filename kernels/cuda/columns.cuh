// SPDX-License-Identifier: Apache-2.0
// Columns of a state in registers, as the chain kernel holds them: eight lanes a column, four columns a warp.
#pragma once

#include "kernels/cuda/chain.h"
#include "kernels/cuda/numbers.cuh"

namespace ashlar::kernels::cuda {

inline constexpr int kColumnThreads = 128;
inline constexpr int kColumnsPerBlock = kColumnThreads / 8;

// For one column: rows 32 b + 4 (lane % 8) + e in x[b][e]; rows past d_k are zero.
template <int kBlocks>
struct Column {
  static constexpr int kRows = 32 * kBlocks;

  float x[kBlocks][4] = {};

  // fn(row, number) for every number that this lane holds.
  template <typename Fn>
  __device__ __forceinline__ void ForEach(Fn&& fn) {
    const int first = 4 * static_cast<int>(threadIdx.x % 8);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) fn(32 * b + first + e, x[b][e]);
    }
  }

  // Σ row[i] x[i] over all lanes of the column; `row` is shared memory of kRows numbers.
  __device__ __forceinline__ float Dot(const float* row) const {
    const int first = 4 * static_cast<int>(threadIdx.x % 8);
    float sum = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float4 w = *reinterpret_cast<const float4*>(row + 32 * b + first);
      sum += w.x * x[b][0] + w.y * x[b][1] + w.z * x[b][2] + w.w * x[b][3];
    }
    return SumOverLanes(sum);
  }
  // x += factor row.
  __device__ __forceinline__ void Add(float factor, const float* row) {
    const int first = 4 * static_cast<int>(threadIdx.x % 8);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float4 w = *reinterpret_cast<const float4*>(row + 32 * b + first);
      x[b][0] += factor * w.x;
      x[b][1] += factor * w.y;
      x[b][2] += factor * w.z;
      x[b][3] += factor * w.w;
    }
  }
  // x *= row, element by element.
  __device__ __forceinline__ void Scale(const float* row) {
    const int first = 4 * static_cast<int>(threadIdx.x % 8);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float4 w = *reinterpret_cast<const float4*>(row + 32 * b + first);
      x[b][0] *= w.x;
      x[b][1] *= w.y;
      x[b][2] *= w.z;
      x[b][3] *= w.w;
    }
  }
  __device__ __forceinline__ void Scale(float factor) {
    ForEach([&](int, float& number) { number *= factor; });
  }

  static __device__ __forceinline__ float SumOverLanes(float sum) {
    sum += ShuffleXor(sum, 1);
    sum += ShuffleXor(sum, 2);
    return sum + ShuffleXor(sum, 4);
  }
};

// The place of this thread's column, which belongs to the head's state or to its transition.
struct Place {
  int32_t head;
  bool transition;
  int32_t column;   // j < d_v in a state, j < d_k in a transition
  int32_t columns;  // number of columns
  __device__ bool inside() const { return column < columns; }
  // The block's column c.
  __device__ Place Sibling(int c) const {
    return {head, transition, column - static_cast<int32_t>(threadIdx.x / 8) + c, columns};
  }
};

__device__ inline int64_t ElementIndex(const Chain& chain, const Place& place, int row) {
  return chain.value_first ? static_cast<int64_t>(place.column) * chain.d_k + row
                           : static_cast<int64_t>(row) * place.columns + place.column;
}

// Columns of a block on their way between registers and memory: [kColumnsPerBlock][kStride] in shared memory, so that
// neighbouring threads access neighbouring numbers in either order of the matrix, and types are distinguished in loops
// that are not unrolled.
template <int kBlocks>
struct Slice {
  static constexpr int kRows = Column<kBlocks>::kRows;
  static constexpr int kStride = kRows + 4;  // columns that a warp reads at once are in different banks

  float numbers[kColumnsPerBlock][kStride];

  __device__ float* own() { return numbers[threadIdx.x / 8]; }

  // fn(row, column of the block, number) for all numbers of the slice, in memory order.
  template <typename Fn>
  __device__ void ForEach(bool rows_together, Fn&& fn) {
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < kColumnsPerBlock * kRows; e += kColumnThreads) {
      const int row = rows_together ? e % kRows : e / kColumnsPerBlock;
      const int column = rows_together ? e / kRows : e % kColumnsPerBlock;
      fn(row, column, numbers[column][row]);
    }
  }
};

// Number (row, column) of R(position) M, M a matrix in memory; unturned where `pairs` is 0.
__device__ inline float TurnedNumber(const Chain& chain, const Place& place, DType dtype, const void* from, int row,
                                     int64_t position, int pairs) {
  const float value = Load(dtype, from, ElementIndex(chain, place, row));
  if (row >= 2 * pairs) return value;
  const bool half_split = chain.rope == RopeStyle::kHalfSplit;
  const bool second = half_split ? row >= pairs : row % 2 == 1;
  const int pair = half_split ? row % pairs : row / 2;
  const int partner = half_split ? (second ? row - pairs : row + pairs) : row ^ 1;
  const float other = Load(dtype, from, ElementIndex(chain, place, partner));
  const float2 turn = Turn(position, chain.frequencies[pair]);
  return value * turn.x + (second ? other : -other) * turn.y;
}

// The block's columns of factor × R(position) `from`, `from` being a matrix in memory, in shared memory: this thread's
// column. All threads of the block take part.
template <int kBlocks>
__device__ const float* ReadColumns(const Chain& chain, const Place& place, DType dtype, const void* from, float factor,
                                    int64_t position, int pairs) {
  auto& slice = *SharedMemory<Slice<kBlocks>>();
  SyncThreads();
  slice.ForEach(chain.value_first, [&](int row, int c, float& number) {
    const Place at = place.Sibling(c);
    const bool inside = row < chain.d_k && at.inside();
    number = inside ? factor * TurnedNumber(chain, at, dtype, from, row, position, pairs) : 0.0f;
  });
  SyncThreads();
  return slice.own();
}

// Reads the start of a chain, without rounding: head `place.head` of a state.
template <int kBlocks>
__device__ void ReadStart(const Chain& chain, const Place& place, DType dtype, const void* const* heads,
                          const int32_t* exponents, Column<kBlocks>& column) {
  const float factor = ldexpf(1, exponents == nullptr ? 0 : exponents[place.head]);
  const float* own = ReadColumns<kBlocks>(chain, place, dtype, heads[place.head], factor, 0, 0);
  column.ForEach([&](int row, float& number) { number = own[row]; });
}

template <int kBlocks>
__device__ void WriteToMemory(const Chain& chain, const Place& place, const Target& target, Column<kBlocks>& column) {
  auto& slice = *SharedMemory<Slice<kBlocks>>();
  SyncThreads();
  column.ForEach([&](int row, float& number) { slice.own()[row] = number; });
  SyncThreads();
  float largest = 0;
  slice.ForEach(chain.value_first, [&](int row, int c, float& number) {
    const Place at = place.Sibling(c);
    if (row >= chain.d_k || !at.inside()) return;
    const int64_t index = ElementIndex(chain, at, row);
    if (target.wide == nullptr) {
      Store(target.dtype, target.heads[place.head], index, number);
    } else {
      target.wide[static_cast<int64_t>(place.head) * chain.d_k * chain.d_v + index] = number;
      largest = fmaxf(largest, fabsf(number));
    }
  });
  if (target.wide == nullptr) return;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, ShuffleXor(largest, mask));
  if (threadIdx.x % 32 == 0) AtomicMax(target.largest + place.head, FloatBits(largest));
}

}  // namespace ashlar::kernels::cuda
