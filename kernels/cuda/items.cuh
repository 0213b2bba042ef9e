// SPDX-License-Identifier: Apache-2.0
// Rows cut into items: what one thread reads, turns and writes at once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/numbers.cuh"
#include "kernels/rows.h"

namespace ashlar::kernels::cuda {

// Rows on one side of a move. Device pointers.
struct Side {
  // Units: row r of a unit is at r × dim. Null: slots.
  void* const* units;
  float* const* scales;
  PagedSlots slots;    // page_table null: one page
  int64_t first_page;  // index of the first page in the page table
};

// The arguments of a call that moves rows from `from` to `to`, one of which is units.
struct Move {
  Side from, to;
  int64_t tokens;
  int64_t first_position;
  int32_t unit_tokens, heads, dim;
  DType dtype;
  RopeStyle style;
  int32_t pairs;        // 0: copy
  const float2* turns;  // [pairs] cos, sin
  uint64_t *checksums, *scale_checksums;
  bool through_shared;  // the unit is read once, into shared memory, and hashed there
};

// kCount neighbouring elements.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T element[kCount];
};

// Elements of a type as bits.
template <DType kType>
struct Element {
  using Bits = std::conditional_t<ElementBytes(kType) == 1, uint8_t,
                                  std::conditional_t<ElementBytes(kType) == 2, uint16_t, uint32_t>>;

  static __device__ float Decode(Bits bits) {
    if constexpr (kType == DType::kF32) return FloatOf(bits);
    if constexpr (kType == DType::kF16) return ToFloat<Half16::kF16>(bits);
    if constexpr (kType == DType::kBF16) return ToFloat<Half16::kBF16>(bits);
    if constexpr (kType == DType::kF8E4M3) return E4M3ToFloat(bits);
    if constexpr (kType == DType::kF8E5M2) return E5M2ToFloat(bits);
  }
  static __device__ Bits Encode(float value) {
    if constexpr (kType == DType::kF32) return FloatBits(value);
    if constexpr (kType == DType::kF16) return FromFloat<Half16::kF16>(value);
    if constexpr (kType == DType::kBF16) return FromFloat<Half16::kBF16>(value);
    if constexpr (sizeof(Bits) == 1) {
      // A value beyond the range becomes the largest number; NaN stays.
      constexpr float kLimit = LargestFinite(kType);
      const float inside = value > kLimit ? kLimit : value < -kLimit ? -kLimit : value;
      return static_cast<Bits>(kType == DType::kF8E4M3 ? FloatToE4M3(inside) : FloatToE5M2(inside));
    }
  }
};

// A row is divided into items of kCount numbers that one thread moves: first the rotated items (pairs of two vectors,
// or vectors of pairs), then the rest.
template <DType kType, int kCount>
struct Items {
  using T = typename Element<kType>::Bits;
  using Vec = Vector<T, kCount>;

  static __device__ bool TwoVectors(const Move& move) { return move.style == RopeStyle::kHalfSplit || kCount == 1; }
  static __device__ int Turning(const Move& move) { return (TwoVectors(move) ? 1 : 2) * move.pairs / kCount; }
  static __device__ int Count(const Move& move) { return Turning(move) + (move.dim - 2 * move.pairs) / kCount; }

  // fn(number) sees every rotated number of the item; its result is written if `to` is not null.
  template <typename Fn>
  static __device__ __forceinline__ void Run(const Move& move, int item, const uint8_t* from, uint8_t* to, Fn&& fn) {
    const auto at = [](auto* row, int element) { return row + element * static_cast<int>(sizeof(T)); };
    const auto read = [&](int element) { return *reinterpret_cast<const Vec*>(at(from, element)); };
    const auto write = [&](int element, const Vec& vector) {
      if (to != nullptr) *reinterpret_cast<Vec*>(at(to, element)) = vector;
    };
    const int turning = Turning(move);
    if (item >= turning) {
      const int element = 2 * move.pairs + (item - turning) * kCount;
      Vec vector = read(element);
#pragma unroll
      for (int e = 0; e < kCount; ++e) vector.element[e] = fn(vector.element[e], false);
      write(element, vector);
      return;
    }
    if (TwoVectors(move)) {
      const bool half_split = move.style == RopeStyle::kHalfSplit;
      const int first = half_split ? item * kCount : 2 * item, second = half_split ? first + move.pairs : first + 1;
      Vec x = read(first), y = read(second);
#pragma unroll
      for (int e = 0; e < kCount; ++e) TurnPair(move, item * kCount + e, x.element[e], y.element[e], fn);
      write(first, x);
      write(second, y);
      return;
    }
    if constexpr (kCount > 1) {
      Vec vector = read(item * kCount);
#pragma unroll
      for (int e = 0; e < kCount; e += 2) {
        TurnPair(move, (item * kCount + e) / 2, vector.element[e], vector.element[e + 1], fn);
      }
      write(item * kCount, vector);
    }
  }

 private:
  template <typename Fn>
  static __device__ __forceinline__ void TurnPair(const Move& move, int pair, T& x, T& y, Fn&& fn) {
    const float2 turn = move.turns[pair];
    const float a = Element<kType>::Decode(x), b = Element<kType>::Decode(y);
    x = fn(a * turn.x - b * turn.y, true);
    y = fn(a * turn.y + b * turn.x, true);
  }
};

// Converts an item's numbers to stored bits: rotated numbers are floats, others are already bits.
template <DType kType>
struct Plain {
  using Bits = typename Element<kType>::Bits;
  __device__ Bits operator()(float turned, bool) const { return Element<kType>::Encode(turned); }
  __device__ Bits operator()(Bits bits, bool) const { return bits; }
};

}  // namespace ashlar::kernels::cuda
