// SPDX-License-Identifier: Apache-2.0
// The arithmetic of element types (tensor/types.h), and their conversion one number at a time. Vector code has its own
// conversions and is checked against these.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "tensor/types.h"

namespace ashlar::kernels {

// Unit roundoff: the largest relative error of rounding a number within the type's normal range to nearest.
constexpr double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 0x1p-24;
    case DType::kF16:
      return 0x1p-11;
    case DType::kBF16:
      return 0x1p-8;
    case DType::kF8E4M3:
      return 0x1p-4;
    case DType::kF8E5M2:
      return 0x1p-3;
  }
  return 0;
}

// Largest finite number of the 8-bit types, to which a row's scale maps its largest magnitude.
constexpr float LargestFinite(DType dtype) {
  return dtype == DType::kF8E4M3 ? 448.0f : 57344.0f;
}

// A binary format by its widths. kFinite: OCP's 8-bit e4m3, which has no infinities and uses the top exponent for
// numbers; only the all-ones pattern is NaN there.
template <int kExponentBits, int kMantissaBits, bool kFinite>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr uint32_t kTopExponent = (1u << kExponentBits) - 1;
  static constexpr uint32_t kMantissaMask = (1u << kMantissaBits) - 1;

  // Rounds to nearest, ties to even. Too large a number becomes infinity, or NaN if the format has no infinity.
  static uint32_t From(float value) {
    const uint32_t sign = (std::bit_cast<uint32_t>(value) >> 31) << (kExponentBits + kMantissaBits);
    const double magnitude = std::fabs(static_cast<double>(value));
    if (!(magnitude == magnitude)) return sign | (kTopExponent << kMantissaBits) | kMantissaMask;
    const uint32_t overflow = kFinite ? (kTopExponent << kMantissaBits) | kMantissaMask : kTopExponent << kMantissaBits;
    if (std::isinf(magnitude)) return sign | overflow;
    if (magnitude == 0) return sign;
    const int exponent = std::max(std::ilogb(magnitude), 1 - kBias);
    // In units of the last place: at most 2^(kMantissaBits + 1), so exact in double, and nearbyint ties to even.
    const auto ulps = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, kMantissaBits - exponent)));
    // A carry out of the mantissa correctly increments the exponent.
    const uint32_t hidden = 1u << kMantissaBits;
    const uint32_t bits =
        ulps < hidden ? ulps : (static_cast<uint32_t>(exponent + kBias) << kMantissaBits) + (ulps - hidden);
    return sign | (bits >= overflow ? overflow : bits);
  }

  static float To(uint32_t bits) {
    const uint32_t exponent = (bits >> kMantissaBits) & kTopExponent, mantissa = bits & kMantissaMask;
    const bool negative = ((bits >> (kExponentBits + kMantissaBits)) & 1) != 0;
    float magnitude;
    if (exponent == kTopExponent && (!kFinite || mantissa == kMantissaMask)) {
      magnitude = !kFinite && mantissa == 0 ? INFINITY : NAN;
    } else if (exponent == 0) {
      magnitude = std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissaBits);
    } else {
      magnitude = std::ldexp(static_cast<float>(mantissa | (1u << kMantissaBits)),
                             static_cast<int>(exponent) - kBias - kMantissaBits);
    }
    return negative ? -magnitude : magnitude;
  }
};
using Half = SmallFloat<5, 10, false>;
using BFloat16 = SmallFloat<8, 7, false>;
using Float8E4M3 = SmallFloat<4, 3, true>;
using Float8E5M2 = SmallFloat<5, 2, false>;

// Element `index` of an array of `dtype`.
float ReadElement(DType dtype, const void* array, int64_t index);
void WriteElement(DType dtype, void* array, int64_t index, float value);

}  // namespace ashlar::kernels
