// The caller's matrices on their way in and out of panels: element types, both orders. Numbers are widened to fp32 when
// they are read, and rounded once to nearest even when they are written. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_MATRIX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_MATRIX_INL_H_
#undef ASHLAR_KERNELS_HOST_MATRIX_INL_H_
#else
#define ASHLAR_KERNELS_HOST_MATRIX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/host/panel-inl.h"
#include "kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

using BitTag = hn::RebindToUnsigned<Tag>;
using Bits = hn::Vec<BitTag>;

// kLanes numbers of 16 bits, as the lower halves of lanes.
HWY_INLINE Bits Load16(const uint16_t* from) {
  return hn::PromoteTo(BitTag(), hn::LoadU(hn::Rebind<uint16_t, Tag>(), from));
}
HWY_INLINE void Store16(Bits bits, uint16_t* to) {
  const hn::Rebind<uint16_t, Tag> d;
  hn::StoreU(hn::DemoteTo(d, hn::BitCast(hn::RebindToSigned<Tag>(), bits)), d, to);
}

// Element types. Load and Store move kLanes numbers, which need not be aligned.
struct F32 {
  using Stored = float;
  static HWY_INLINE Vec Load(const float* from) { return hn::LoadU(Tag(), from); }
  static HWY_INLINE void Store(Vec v, float* to) { hn::StoreU(v, Tag(), to); }
};

struct BF16 {
  using Stored = uint16_t;
  static HWY_INLINE Vec Load(const uint16_t* from) { return hn::BitCast(Tag(), hn::ShiftLeft<16>(Load16(from))); }
  // Highway's own conversion cuts off. Its Ne is false of NaN on some targets, hence Eq.
  static HWY_INLINE void Store(Vec v, uint16_t* to) {
    const BitTag d;
    const Bits bits = hn::BitCast(d, v), high = hn::ShiftRight<16>(bits);
    const Bits up = hn::Add(hn::Set(d, 0x7FFF), hn::And(high, hn::Set(d, 1)));
    const Bits rounded = hn::ShiftRight<16>(hn::Add(bits, up));
    const auto number = hn::RebindMask(d, hn::Eq(v, v));
    Store16(hn::IfThenElse(number, rounded, hn::Or(high, hn::Set(d, 0x40))), to);
  }
};

struct F16 {
  using Stored = uint16_t;
  // Highway's conversions for processors without F16C cut off, and read infinities and NaN as numbers.
  static constexpr bool kInHardware = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3;
  static constexpr uint32_t kBiasChange = (127 - 15) << 23;

  template <class D = Tag>
  static HWY_INLINE hn::Vec<D> Load(const uint16_t* from) {
    const D d;
    if constexpr (kInHardware) {
      const hn::Rebind<uint16_t, D> d16;
      return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), hn::LoadU(d16, from)));
    } else {
      const BitTag bit;
      const Bits bits = Load16(from), magnitude = hn::And(bits, hn::Set(bit, 0x7FFF));
      const Bits shifted = hn::ShiftLeft<13>(magnitude);
      const Vec count = hn::ConvertTo(d, hn::BitCast(hn::RebindToSigned<Tag>(), magnitude));
      const Bits subnormal = hn::BitCast(bit, hn::Mul(count, hn::Set(d, 0x1p-24f)));
      const Bits normal = hn::Add(shifted, hn::Set(bit, kBiasChange));
      const Bits infinite = hn::Or(shifted, hn::Set(bit, 0x7F800000));
      const Bits finite = hn::IfThenElse(hn::Lt(magnitude, hn::Set(bit, 0x400)), subnormal, normal);
      const Bits number = hn::IfThenElse(hn::Lt(magnitude, hn::Set(bit, 0x7C00)), finite, infinite);
      return hn::BitCast(d, hn::Or(number, hn::ShiftLeft<16>(hn::Sub(bits, magnitude))));
    }
  }

  template <class D = Tag>
  static HWY_INLINE void Store(hn::Vec<D> v, uint16_t* to) {
    const D d;
    if constexpr (kInHardware) {
      const hn::Rebind<uint16_t, D> d16;
      hn::StoreU(hn::BitCast(d16, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), v)), d16, to);
    } else {
      const BitTag bit;
      const Vec size = hn::Abs(v);
      const Bits bits = hn::BitCast(bit, size);
      // One half has the last place of a subnormal: the sum is rounded where it should be.
      const Bits half = hn::BitCast(bit, hn::Set(d, 0.5f));
      const Bits subnormal = hn::Sub(hn::BitCast(bit, hn::Add(size, hn::Set(d, 0.5f))), half);
      const Bits up = hn::Add(hn::Set(bit, 0xFFF), hn::And(hn::ShiftRight<13>(bits), hn::Set(bit, 1)));
      const Bits normal = hn::ShiftRight<13>(hn::Sub(hn::Add(bits, up), hn::Set(bit, kBiasChange)));
      const Bits finite = hn::IfThenElse(hn::RebindMask(bit, hn::Lt(size, hn::Set(d, 0x1p-14f))), subnormal, normal);
      const Bits number =
          hn::IfThenElse(hn::RebindMask(bit, hn::Lt(size, hn::Set(d, 65520.0f))), finite, hn::Set(bit, 0x7C00));
      const Bits any = hn::IfThenElse(hn::RebindMask(bit, hn::Eq(v, v)), number, hn::Set(bit, 0x7E00));
      const Bits sign = hn::ShiftRight<16>(hn::Sub(hn::BitCast(bit, v), bits));
      Store16(hn::Or(any, sign), to);
    }
  }
};

// fn(F32()), fn(F16()) or fn(BF16()).
template <typename Fn>
HWY_INLINE auto WithElements(DType dtype, const Fn& fn) {
  if (dtype == DType::kF16) return fn(F16());
  return dtype == DType::kBF16 ? fn(BF16()) : fn(F32());
}
template <class E>
const typename E::Stored* Elements(const void* array, size_t index = 0) {
  return static_cast<const typename E::Stored*>(array) + index;
}
template <class E>
typename E::Stored* Elements(void* array, size_t index = 0) {
  return static_cast<typename E::Stored*>(array) + index;
}

// The first `count` < kLanes numbers of a vector, the others zero.
template <class E>
HWY_INLINE Vec LoadPart(const typename E::Stored* from, size_t count) {
  HWY_ALIGN typename E::Stored part[kLanes] = {};
  std::copy_n(from, count, part);
  return E::Load(part);
}
template <class E>
HWY_INLINE void StorePart(Vec v, typename E::Stored* to, size_t count) {
  HWY_ALIGN typename E::Stored part[kLanes];
  E::Store(v, part);
  std::copy_n(part, count, to);
}

// to[i] ← scale × from[i] for i < n, in fp32.
template <class E>
HWY_INLINE void Widen(const typename E::Stored* HWY_RESTRICT from, size_t n, float scale, float* HWY_RESTRICT to) {
  const Vec factor = hn::Set(Tag(), scale);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) hn::StoreU(hn::Mul(factor, E::Load(from + i)), Tag(), to + i);
  if (i < n) StorePart<F32>(hn::Mul(factor, LoadPart<E>(from + i, n - i)), to + i, n - i);
}
// The way back.
template <class E>
HWY_INLINE void Narrow(const float* HWY_RESTRICT from, size_t n, float scale, typename E::Stored* HWY_RESTRICT to) {
  const Vec factor = hn::Set(Tag(), scale);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) E::Store(hn::Mul(factor, hn::LoadU(Tag(), from + i)), to + i);
  if (i < n) StorePart<E>(hn::Mul(factor, LoadPart<F32>(from + i, n - i)), to + i, n - i);
}

// panel ← scale × `rows` rows of `columns` numbers, padded. Row i lies at from + i * stride.
template <class E>
HWY_INLINE void LoadPanel(const typename E::Stored* HWY_RESTRICT from, size_t stride, size_t rows, size_t columns,
                          float scale, float* HWY_RESTRICT panel) {
  for (size_t i = 0; i < rows; ++i, panel += kWidth) {
    Widen<E>(from + i * stride, columns == kWidth ? kWidth : columns, scale, panel);
    std::fill(panel + columns, panel + kWidth, 0.0f);
  }
  std::fill(panel, panel + (RoundUp(rows, kRows) - rows) * kWidth, 0.0f);
}
template <class E>
HWY_INLINE void StorePanel(const float* HWY_RESTRICT panel, size_t rows, size_t columns, float scale,
                           typename E::Stored* HWY_RESTRICT to, size_t stride) {
  for (size_t i = 0; i < rows; ++i) {
    Narrow<E>(panel + i * kWidth, columns == kWidth ? kWidth : columns, scale, to + i * stride);
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

// Rows of a matrix that is transposed are widened this many at a time, so that they stay in the nearest cache.
constexpr size_t kStrip = 4;

// LoadPanel from memory that holds the transpose: column j of the panel lies at from + j * stride.
template <class E>
HWY_INLINE void LoadPanelTransposed(const typename E::Stored* HWY_RESTRICT from, size_t stride, size_t rows,
                                    size_t columns, float scale, float* HWY_RESTRICT panel) {
  if (columns < kWidth) std::fill(panel, panel + rows * kWidth, 0.0f);
  HWY_ALIGN float strip[kStrip * kMaxHeadDim];
  for (size_t j = 0; j < columns; j += kStrip) {
    const size_t count = std::min(kStrip, columns - j);
    if constexpr (std::is_same_v<E, F32>) {
      if (scale == 1) {
        Transpose(from + j * stride, stride, rows, count, panel + j, kWidth);
        continue;
      }
    }
    for (size_t c = 0; c < count; ++c) Widen<E>(from + (j + c) * stride, rows, scale, strip + c * kMaxHeadDim);
    Transpose(strip, kMaxHeadDim, rows, count, panel + j, kWidth);
  }
  std::fill(panel + rows * kWidth, panel + RoundUp(rows, kRows) * kWidth, 0.0f);
}
template <class E>
HWY_INLINE void StorePanelTransposed(const float* HWY_RESTRICT panel, size_t rows, size_t columns, float scale,
                                     typename E::Stored* HWY_RESTRICT to, size_t stride) {
  HWY_ALIGN float strip[kStrip * kMaxHeadDim];
  for (size_t j = 0; j < columns; j += kStrip) {
    const size_t count = std::min(kStrip, columns - j);
    Transpose(panel + j, kWidth, count, rows, strip, kMaxHeadDim);
    for (size_t c = 0; c < count; ++c) Narrow<E>(strip + c * kMaxHeadDim, rows, scale, to + (j + c) * stride);
  }
}

// The largest magnitude of n numbers and `largest`; NaN is not looked at.
HWY_INLINE Vec LargestOf(const float* HWY_RESTRICT from, size_t n, Vec largest) {
  for (size_t i = 0; i < n; i += kLanes) {
    const Vec size = hn::Abs(i + kLanes <= n ? hn::LoadU(Tag(), from + i) : LoadPart<F32>(from + i, n - i));
    largest = hn::IfThenElse(hn::Gt(size, largest), size, largest);
  }
  return largest;
}

// The exponent of a state of fp16 whose largest magnitude is given: the least e ≥ 0 with largest ≤ 2^(e + 15).
inline int HalfExponent(float largest) {
  if (!(largest > 0x1p15f) || std::isinf(largest)) return 0;
  int exponent;
  const float mantissa = std::frexp(largest, &exponent);  // in [0.5, 1)
  return (mantissa == 0.5f ? exponent - 1 : exponent) - 15;
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
