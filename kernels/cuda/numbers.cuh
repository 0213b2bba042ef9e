// SPDX-License-Identifier: Apache-2.0
// Elements of cached tensors on the device: reading them as fp32, writing them rounded to nearest even.
#pragma once

#include <cstdint>
#include <device_isa.cuh>

#include "kernels/dtype.h"

namespace ashlar::kernels::cuda {

__device__ inline float E4M3ToFloat(uint32_t bits) {
  if ((bits & 0x7f) == 0x7f) return FloatOf(0x7fc00000u);
  // Moved into half's fields the exponent is short by the difference of the biases, 8.
  return 256.0f * ToFloat<Half16::kF16>(static_cast<uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7));
}
__device__ inline float E5M2ToFloat(uint32_t bits) {
  return ToFloat<Half16::kF16>(static_cast<uint16_t>(bits << 8));
}

// A float as an 8-bit format (dtype.h, SmallFloat): too large a number becomes `overflow`.
template <int kExponentBits, int kMantissaBits, uint32_t kOverflow, uint32_t kNan>
__device__ inline uint32_t ToFloat8(float value) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int kDropped = 23 - kMantissaBits;
  const uint32_t sign = FloatBits(value) >> 31 << 7, magnitude = FloatBits(value) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | kNan;
  if (magnitude < static_cast<uint32_t>(128 - kBias) << 23) {
    // Below the normal range numbers are whole multiples of the least one; the sum rounds to one of these multiples.
    constexpr float kAligner = 1.5f * (1u << (24 - kBias - kMantissaBits));
    return sign | (FloatBits(FloatOf(magnitude) + kAligner) - FloatBits(kAligner));
  }
  const uint32_t odd = magnitude >> kDropped & 1;
  const uint32_t rounded = (magnitude + (1u << (kDropped - 1)) - 1 + odd) >> kDropped;
  const uint32_t bits = rounded - (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
  return sign | (bits >= kOverflow ? kOverflow : bits);
}

__device__ inline uint32_t FloatToE4M3(float value) {
  return ToFloat8<4, 3, 0x7f, 0x7f>(value);
}
__device__ inline uint32_t FloatToE5M2(float value) {
  return ToFloat8<5, 2, 0x7c, 0x7f>(value);
}

// Element `index` of an array.
__device__ inline float Load(DType dtype, const void* array, int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(array)[index];
    case DType::kF16:
      return ToFloat<Half16::kF16>(static_cast<const uint16_t*>(array)[index]);
    case DType::kBF16:
      return ToFloat<Half16::kBF16>(static_cast<const uint16_t*>(array)[index]);
    case DType::kF8E4M3:
      return E4M3ToFloat(static_cast<const uint8_t*>(array)[index]);
    case DType::kF8E5M2:
      return E5M2ToFloat(static_cast<const uint8_t*>(array)[index]);
  }
  return 0;
}

// The same for the types of linear layers.
__device__ inline void Store(DType dtype, void* array, int64_t index, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(array)[index] = value;
      return;
    case DType::kF16:
      static_cast<uint16_t*>(array)[index] = FromFloat<Half16::kF16>(value);
      return;
    case DType::kBF16:
      static_cast<uint16_t*>(array)[index] = FromFloat<Half16::kBF16>(value);
      return;
    default:
      return;
  }
}

// cos and sin of position × frequency. The angle is reduced modulo full turns in fp64, so that its fp32 value is small.
__device__ inline float2 Turn(int64_t position, double frequency) {
  constexpr double kInversePi = 0.31830988618379067154;
  const double half_turns = static_cast<double>(position) * frequency * kInversePi;
  float2 turn;
  sincospif(static_cast<float>(half_turns - 2 * rint(0.5 * half_turns)), &turn.y, &turn.x);
  return turn;
}

}  // namespace ashlar::kernels::cuda
