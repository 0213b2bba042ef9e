// SPDX-License-Identifier: Apache-2.0
#include "kernels/convert.h"

#include <bit>
#include <cstring>

#include "kernels/dtype.h"

namespace ashlar::kernels {
namespace {

// In integer arithmetic on fp32's bits. NaNs become the type's NaN of all ones.
template <int kExponentBits, int kMantissaBits>
uint16_t Round(float value) {
  constexpr int kShift = 23 - kMantissaBits, kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr uint32_t kInfinity = ((1u << kExponentBits) - 1) << kMantissaBits;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - kBias) << 23;  // as fp32
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fff'ffff;
  const uint32_t sign = (bits >> 31) << (kExponentBits + kMantissaBits);
  if (magnitude > 0x7f80'0000) return static_cast<uint16_t>(sign | kInfinity | ((1u << kMantissaBits) - 1));
  uint32_t rounded;
  if (kBias == 127 || magnitude >= kSmallestNormal) {
    const uint32_t up = (1u << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1);
    rounded = ((magnitude + up) >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
  } else {
    // Its last place is 2^(1 − kBias − kMantissaBits). A sum with 2^23 of these has no bits after it, so it is rounded.
    constexpr float kPlaces = std::bit_cast<float>(static_cast<uint32_t>(151 - kBias - kMantissaBits) << 23);
    rounded = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kPlaces) - std::bit_cast<uint32_t>(kPlaces);
  }
  return static_cast<uint16_t>(sign | (rounded < kInfinity ? rounded : kInfinity));
}

}  // namespace

void WriteElements(DType dtype, void* to, const float* from, uint64_t count) {
  auto* const halves = static_cast<uint16_t*>(to);
  switch (dtype) {
    case DType::kF32:
      std::memcpy(to, from, count * sizeof(float));
      return;
    case DType::kF16:
      for (uint64_t i = 0; i < count; ++i) halves[i] = Round<5, 10>(from[i]);
      return;
    case DType::kBF16:
      for (uint64_t i = 0; i < count; ++i) halves[i] = Round<8, 7>(from[i]);
      return;
    case DType::kF8E4M3:
    case DType::kF8E5M2:
      for (uint64_t i = 0; i < count; ++i) WriteElement(dtype, to, static_cast<int64_t>(i), from[i]);
      return;
  }
}

}  // namespace ashlar::kernels
