// SPDX-License-Identifier: Apache-2.0
// A warp's sixteen rows of Z = Sᵀ in tensor-core fragments, and products with matrices in shared memory.
//
// Z has the layout of the tensor cores' results: tile n has columns 8n … 8n + 7; lane l holds its rows l / 4 (numbers
// 0, 1) and l / 4 + 8 (numbers 2, 3), columns 2 (l % 4) and the next. Two neighbouring tiles form a left operand, so a
// chain of products never leaves the registers.
#pragma once

#include "kernels/cuda/numbers.cuh"

namespace ashlar::kernels::cuda {

template <int kTiles>
using Tiles = float[kTiles][4];

// kTransposed: the right operand B [k, n] is stored in rows of k; otherwise in rows of n. `matrix` is its upper left
// corner, stride in elements. Numbers of the left operand are split in two, hi + lo, so that products have twice the
// mantissa.
template <DType kType>
struct Products {
  static constexpr Half16 kHalf = kType == DType::kF16 ? Half16::kF16 : Half16::kBF16;
  static constexpr int kDepth = 16;  // columns of the left operand that are read at once
  // fp16 only covers 2^−24 to 2^16: rows are first scaled to about 2^10.
  static constexpr bool kScaled = kType == DType::kF16;
  using Element = uint16_t;

  // acc[n] += Z[first …] B for kPairs pairs of tiles, of which `pairs` exist.
  template <bool kTransposed, int kPairs, int kTiles>
  static __device__ __forceinline__ void Multiply(const float (&z0)[4], const float (&z1)[4], const Element* matrix,
                                                  int stride, int pairs, Tiles<kTiles>& acc) {
    uint32_t high[4], low[4];
    Split(z0[0], z0[1], high[0], low[0]);
    Split(z0[2], z0[3], high[1], low[1]);
    Split(z1[0], z1[1], high[2], low[2]);
    Split(z1[2], z1[3], high[3], low[3]);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int n = lane / 16 * 8 + (kTransposed ? 0 : lane % 8), k = lane / 8 % 2 * 8 + (kTransposed ? lane % 8 : 0);
    const Element* row = matrix + (kTransposed ? k * stride + n : n * stride + k);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      if (p >= pairs) continue;
      uint32_t b[4];
      LoadMatrices<kTransposed>(b, row + (kTransposed ? 16 * p : 16 * p * stride));
      MultiplyAdd<kHalf>(acc[2 * p], high, b[0], b[1]);
      MultiplyAdd<kHalf>(acc[2 * p + 1], high, b[2], b[3]);
      MultiplyAdd<kHalf>(acc[2 * p], low, b[0], b[1]);
      MultiplyAdd<kHalf>(acc[2 * p + 1], low, b[2], b[3]);
    }
  }

  // Two neighbouring tiles of a matrix stored in rows of n (tiles' rows), or, transposed, in rows of columns.
  template <bool kTransposed>
  static __device__ __forceinline__ void ReadTiles(const Element* matrix, int stride, float (&first)[4],
                                                   float (&second)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t pairs[4];
    // Rows 0 … 7 and 8 … 15 of the first tile, then of the second.
    const int row = lane / 8 % 2 * 8 + (kTransposed ? 0 : lane % 8),
              column = lane / 16 * 8 + (kTransposed ? lane % 8 : 0);
    LoadMatrices<kTransposed>(pairs, matrix + (kTransposed ? column * stride + row : row * stride + column));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[2 * i] = ToFloat<kHalf>(static_cast<uint16_t>(pairs[i]));
      first[2 * i + 1] = ToFloat<kHalf>(static_cast<uint16_t>(pairs[i] >> 16));
      second[2 * i] = ToFloat<kHalf>(static_cast<uint16_t>(pairs[2 + i]));
      second[2 * i + 1] = ToFloat<kHalf>(static_cast<uint16_t>(pairs[2 + i] >> 16));
    }
  }

 private:
  static __device__ __forceinline__ void Split(float x, float y, uint32_t& high, uint32_t& low) {
    high = Pack<kHalf>(x, y);
    low = Pack<kHalf>(x - ToFloat<kHalf>(static_cast<uint16_t>(high)),
                      y - ToFloat<kHalf>(static_cast<uint16_t>(high >> 16)));
  }
};

// fp32 by three products of tf32: hi hi + hi lo + lo hi.
template <>
struct Products<DType::kF32> {
  static constexpr bool kScaled = false;
  using Element = float;

  template <bool kTransposed, int kPairs, int kTiles>
  static __device__ __forceinline__ void Multiply(const float (&z0)[4], const float (&z1)[4], const Element* matrix,
                                                  int stride, int pairs, Tiles<kTiles>& acc) {
    MultiplyTile<kTransposed, kPairs>(z0, matrix, stride, pairs, acc);
    MultiplyTile<kTransposed, kPairs>(z1, matrix + (kTransposed ? 8 * stride : 8), stride, pairs, acc);
  }

  template <bool kTransposed>
  static __device__ __forceinline__ void ReadTiles(const Element* matrix, int stride, float (&first)[4],
                                                   float (&second)[4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      first[i] = matrix[kTransposed ? column * stride + row : row * stride + column];
      second[i] = matrix[kTransposed ? (column + 8) * stride + row : row * stride + column + 8];
    }
  }

 private:
  // The tensor core's columns t and t + 4 of the left operand are columns 2t and 2t + 1 of the tile, and likewise the
  // right operand's rows: the order of a sum does not matter.
  template <bool kTransposed, int kPairs, int kTiles>
  static __device__ __forceinline__ void MultiplyTile(const float (&z)[4], const Element* matrix, int stride, int pairs,
                                                      Tiles<kTiles>& acc) {
    const float high[4] = {RoundToTf32(z[0]), RoundToTf32(z[2]), RoundToTf32(z[1]), RoundToTf32(z[3])};
    const float low[4] = {RoundToTf32(z[0] - high[0]), RoundToTf32(z[2] - high[1]), RoundToTf32(z[1] - high[2]),
                          RoundToTf32(z[3] - high[3])};
    const int lane = static_cast<int>(threadIdx.x) % 32, n = lane / 4, k = lane % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < 2 * kPairs; ++tile) {
      if (tile >= 2 * pairs) continue;
      const Element* at = matrix + (kTransposed ? k * stride + 8 * tile + n : (8 * tile + n) * stride + k);
      const float b0 = at[0], b1 = at[kTransposed ? stride : 1];
      const float high0 = RoundToTf32(b0), high1 = RoundToTf32(b1);
      MultiplyAddTf32(acc[tile], high, high0, high1);
      MultiplyAddTf32(acc[tile], high, RoundToTf32(b0 - high0), RoundToTf32(b1 - high1));
      MultiplyAddTf32(acc[tile], low, high0, high1);
    }
  }
};

// Powers of two that scale each of a lane's two rows to at most 2^11: `up` multiplies the row, `down` reverts it. Rows
// of zeros are unchanged.
struct RowScale {
  float up[2] = {1, 1}, down[2] = {1, 1};
};
template <int kTiles>
__device__ __forceinline__ RowScale ScaleOf(const Tiles<kTiles>& z) {
  RowScale scale;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) largest = fmaxf(largest, fmaxf(fabsf(z[n][2 * r]), fabsf(z[n][2 * r + 1])));
    largest = fmaxf(largest, ShuffleXor(largest, 1));
    largest = fmaxf(largest, ShuffleXor(largest, 2));
    // The exponents are limited so that fp32 can revert them.
    int exponent = static_cast<int>(FloatBits(largest) >> 23) - 127 - 10;
    exponent = exponent < -60 ? -60 : exponent > 100 ? 100 : exponent;
    if (largest == 0) exponent = 0;
    scale.up[r] = FloatOf(static_cast<uint32_t>(127 - exponent) << 23);
    scale.down[r] = FloatOf(static_cast<uint32_t>(127 + exponent) << 23);
  }
  return scale;
}

}  // namespace ashlar::kernels::cuda
