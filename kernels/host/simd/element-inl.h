// SPDX-License-Identifier: Apache-2.0
// Vectors of fp32 numbers from and to arrays of every element type: loads are exact, stores round once, to nearest.
// Included once for every target of Highway.
#if defined(ASHLAR_KERNELS_HOST_ELEMENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_ELEMENT_INL_H_
#undef ASHLAR_KERNELS_HOST_ELEMENT_INL_H_
#else
#define ASHLAR_KERNELS_HOST_ELEMENT_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The C++ type of an array's elements, by dtype.
template <DType kType>
using Stored = std::conditional_t<ElementBytes(kType) == 4, float,
                                  std::conditional_t<ElementBytes(kType) == 2, uint16_t, uint8_t>>;

// True if Highway uses the CPU's own conversions of fp16; its substitutes truncate, and treat infinities and NaN as
// numbers.
inline constexpr bool kConvertsHalf =
    HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON;

// Returns the bits of `values` in a format narrower than fp32 in both fields, one number per lane, ties to even. A
// number beyond the range becomes `kLargest`, or infinity if `kLargest` is 0. NaN stays NaN.
template <int kExponentBits, int kMantissaBits, int kLargest, class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> RoundBits(D d, hn::Vec<D> values) {
  const hn::RebindToUnsigned<D> du;
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1, kDropped = 23 - kMantissaBits;
  constexpr uint32_t kNaN = (1u << (kExponentBits + kMantissaBits)) - 1;
  constexpr uint32_t kInfinity = ((1u << kExponentBits) - 1) << kMantissaBits;
  const auto sign = hn::ShiftLeft<kExponentBits + kMantissaBits>(hn::ShiftRight<31>(hn::BitCast(du, values)));
  auto magnitude = hn::Abs(values);
  if constexpr (kLargest != 0) magnitude = hn::Min(magnitude, hn::Set(d, static_cast<float>(kLargest)));
  // Round to nearest even: add half an ulp, minus 1 if the kept last bit is 0.
  const auto bits = hn::BitCast(du, magnitude);
  const auto odd = hn::And(hn::ShiftRight<kDropped>(bits), hn::Set(du, 1));
  const auto carried = hn::Add(hn::Add(bits, odd), hn::Set(du, (1u << (kDropped - 1)) - 1));
  auto rounded = hn::Sub(hn::ShiftRight<kDropped>(carried), hn::Set(du, uint32_t{127 - kBias} << kMantissaBits));
  if constexpr (kLargest == 0) rounded = hn::Min(rounded, hn::Set(du, kInfinity));
  // Subnormal numbers count units of the format's last place, which is the last place of this sum.
  constexpr int kExponent = 24 - kBias - kMantissaBits;
  constexpr float kMagic = kExponent >= 0 ? static_cast<float>(1 << (kExponent & 31)) : 1.0f / (1 << (-kExponent & 31));
  const auto magic = hn::Set(d, kMagic);
  const auto units = hn::Sub(hn::BitCast(du, hn::Add(magnitude, magic)), hn::BitCast(du, magic));
  const auto least_normal = hn::Set(d, 1.0f / (1 << (kBias - 1)));
  rounded = hn::IfThenElse(hn::RebindMask(du, hn::Lt(magnitude, least_normal)), units, rounded);
  rounded = hn::IfThenElse(hn::RebindMask(du, hn::Eq(values, values)), rounded, hn::Set(du, kNaN));
  return hn::Or(sign, rounded);
}

// The same for bf16, which has fp32's exponents.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> RoundToBFloat16(D, hn::Vec<D> values) {
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::BitCast(du, values);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, odd), hn::Set(du, 0x7FFF)));
  return hn::IfThenElse(hn::RebindMask(du, hn::Eq(values, values)), rounded, hn::Set(du, 0x7FFF));
}

// Numbers of fp16, exactly.
template <class D>
HWY_INLINE hn::Vec<D> WidenHalf(D d, hn::Vec<hn::Rebind<uint16_t, D>> half) {
  if constexpr (kConvertsHalf) {
    return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), half));
  } else {
    const hn::RebindToUnsigned<D> du;
    const auto bits = hn::PromoteTo(du, half), magnitude = hn::And(bits, hn::Set(du, 0x7FFF));
    const auto shifted = hn::ShiftLeft<13>(magnitude);
    const auto units = hn::ConvertTo(d, hn::BitCast(hn::RebindToSigned<D>(), magnitude));
    const auto subnormal = hn::BitCast(du, hn::Mul(units, hn::Set(d, 0x1p-24f)));
    const auto normal = hn::Add(shifted, hn::Set(du, (127 - 15) << 23));
    const auto finite = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x400)), subnormal, normal);
    const auto other = hn::Or(shifted, hn::Set(du, 0x7F800000));  // infinity or NaN
    const auto number = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x7C00)), finite, other);
    return hn::BitCast(d, hn::Or(number, hn::ShiftLeft<16>(hn::Sub(bits, magnitude))));
  }
}

template <DType kType, class D>
HWY_INLINE hn::Vec<D> LoadElements(D d, const Stored<kType>* from) {
  const hn::Rebind<Stored<kType>, D> stored;
  if constexpr (kType == DType::kF32) {
    return hn::LoadU(d, from);
  } else if constexpr (kType == DType::kBF16) {
    const hn::RebindToUnsigned<D> du;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(stored, from))));
  } else if constexpr (kType == DType::kF16) {
    return WidenHalf(d, hn::LoadU(stored, from));
  } else {
    // By way of fp16, which covers both: e5m2 is its upper byte, and e4m3 is 2^8 times the value of its bits there.
    const hn::Rebind<uint16_t, D> du16;
    const auto bits = hn::PromoteTo(du16, hn::LoadU(stored, from));
    if constexpr (kType == DType::kF8E5M2) return WidenHalf(d, hn::ShiftLeft<8>(bits));
    const auto sign = hn::ShiftLeft<8>(hn::And(bits, hn::Set(du16, 0x80)));
    const auto magnitude = hn::ShiftLeft<7>(hn::And(bits, hn::Set(du16, 0x7F)));
    const auto value = hn::Mul(WidenHalf(d, hn::Or(sign, magnitude)), hn::Set(d, 256.0f));
    // All ones would be 480, but is NaN.
    return hn::IfThenElse(hn::Eq(hn::Abs(value), hn::Set(d, 480.0f)), hn::NaN(d), value);
  }
}

// 8-bit numbers saturate, because an infinite key would corrupt a whole request. kStream: past the caches; `to` is
// aligned to the size of the write.
template <DType kType, bool kStream, class D>
HWY_INLINE void StoreElements(hn::Vec<D> values, D d, Stored<kType>* to) {
  const hn::Rebind<Stored<kType>, D> stored;
  const hn::RebindToSigned<D> di;
  const auto put = [&](auto elements) HWY_ATTR {
    if constexpr (kStream) {
      hn::Stream(elements, stored, to);
    } else {
      hn::StoreU(elements, stored, to);
    }
  };
  if constexpr (kType == DType::kF32) {
    put(values);
  } else if constexpr (kType == DType::kBF16) {
    put(hn::DemoteTo(stored, hn::BitCast(di, RoundToBFloat16(d, values))));
  } else if constexpr (kType == DType::kF16) {
    if constexpr (kConvertsHalf) {
      put(hn::BitCast(stored, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), values)));
    } else {
      put(hn::DemoteTo(stored, hn::BitCast(di, RoundBits<5, 10, 0>(d, values))));
    }
  } else if constexpr (kType == DType::kF8E4M3) {
    put(hn::DemoteTo(stored, hn::BitCast(di, RoundBits<4, 3, 448>(d, values))));
  } else {
    put(hn::DemoteTo(stored, hn::BitCast(di, RoundBits<5, 2, 57344>(d, values))));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();
#endif  // per-target guard
