// SPDX-License-Identifier: Apache-2.0
// Blocks of keys and values in their pages, and on their way to fp32 rows. Included once for every target of Highway.
#if defined(ASHLAR_KERNELS_HOST_KEY_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_KEY_BLOCK_INL_H_
#undef ASHLAR_KERNELS_HOST_KEY_BLOCK_INL_H_
#else
#define ASHLAR_KERNELS_HOST_KEY_BLOCK_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/host/rows/key_angles.h"
#include "kernels/host/simd/element-inl.h"
#include "kernels/rows.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {
namespace attention {

inline constexpr size_t kMaxBlock = 32;

// The addresses of the rows of a block's keys (or values) in their pages.
struct RawRows {
  const std::byte* row[kMaxBlock];
  float scale[kMaxBlock];
};

HWY_INLINE void Locate(const PagedSlots& slots, int64_t slot, int32_t head, size_t count, RawRows& raw) {
  const auto element = static_cast<int64_t>(ElementBytes(slots.dtype));
  for (size_t i = 0; i < count;) {
    const int64_t page = slots.page_table[slot / slots.page_tokens], in_page = slot % slots.page_tokens;
    const auto run = std::min<size_t>(count - i, static_cast<size_t>(slots.page_tokens - in_page));
    const std::byte* row =
        static_cast<const std::byte*>(slots.base) +
        element * (page * slots.page_stride + in_page * slots.token_stride + head * slots.head_stride);
    const float* scale = slots.scales;
    if (scale != nullptr) {
      scale += page * slots.scale_page_stride + in_page * slots.scale_token_stride + head * slots.scale_head_stride;
    }
    for (const size_t end = i + run; i < end; ++i, ++slot) {
      raw.row[i] = row;
      row += element * slots.token_stride;
      raw.scale[i] = scale == nullptr ? 1.0f : *scale;
      if (scale != nullptr) scale += slots.scale_token_stride;
    }
  }
}

// Prefetches the lines of a block's rows a few at a time, in the `steps` of the work on the previous block. If all were
// requested at once, they would wait for one another, and the work for them.
class Prefetcher {
 public:
  Prefetcher(const RawRows& raw, size_t rows, size_t row_bytes, size_t steps)
      : raw_(raw),
        lines_((row_bytes + kLine - 1) / kLine),
        left_(rows * lines_),
        per_step_((left_ + steps - 1) / steps) {}

  HWY_INLINE void Step() {
    for (size_t i = std::min(per_step_, left_); i > 0; --i, --left_) {
      __builtin_prefetch(raw_.row[row_] + line_ * kLine, 0, 2);
      if (++line_ == lines_) line_ = 0, ++row_;
    }
  }

 private:
  static constexpr size_t kLine = 64;
  const RawRows& raw_;
  const size_t lines_;
  size_t left_;
  const size_t per_step_;
  size_t row_ = 0, line_ = 0;
};

// to ← scale × R(its angle) of a row's rotary dimensions.
template <DType kType>
HWY_INLINE void StageTurned(const KeyAngles& angles, size_t j, const Stored<kType>* from, float scale, float* to) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> one;
  const int32_t dims = angles.rotary_dim(), half = dims / 2;
  const float *const c0 = angles.cosine(), *const s0 = angles.sine();
  const float *const c1 = angles.offset_cosine(j), *const s1 = angles.offset_sine(j);
  const auto turn_pairs = [&](auto tag, int32_t i, int32_t a, int32_t b) HWY_ATTR {
    const auto ca = hn::LoadU(tag, c0 + i), sa = hn::LoadU(tag, s0 + i);
    const auto cb = hn::LoadU(tag, c1 + i), sb = hn::LoadU(tag, s1 + i);
    const auto c = hn::NegMulAdd(sa, sb, hn::Mul(ca, cb)), s = hn::MulAdd(sa, cb, hn::Mul(ca, sb));
    const auto x = hn::Mul(LoadElements<kType>(tag, from + a), hn::Set(tag, scale));
    const auto y = hn::Mul(LoadElements<kType>(tag, from + b), hn::Set(tag, scale));
    hn::StoreU(hn::NegMulAdd(y, s, hn::Mul(x, c)), tag, to + a);
    hn::StoreU(hn::MulAdd(x, s, hn::Mul(y, c)), tag, to + b);
  };
  const auto step = static_cast<int32_t>(hn::Lanes(d));
  int32_t i = 0;
  if (angles.style() == RopeStyle::kHalfSplit) {
    for (; i + step <= half; i += step) turn_pairs(d, i, i, half + i);
    for (; i < half; ++i) turn_pairs(one, i, i, half + i);
    return;
  }
  if constexpr (hn::MaxLanes(d) > 1) {
    for (; i + step <= dims; i += step) {
      const auto ca = hn::LoadU(d, c0 + i), sa = hn::LoadU(d, s0 + i);
      const auto cb = hn::LoadU(d, c1 + i), sb = hn::LoadU(d, s1 + i);
      const auto c = hn::NegMulAdd(sa, sb, hn::Mul(ca, cb)), s = hn::MulAdd(sa, cb, hn::Mul(ca, sb));
      const auto pairs = hn::Mul(LoadElements<kType>(d, from + i), hn::Set(d, scale));
      hn::StoreU(hn::MulAdd(hn::Reverse2(d, pairs), s, hn::Mul(pairs, c)), d, to + i);
    }
  }
  for (; i < dims; i += 2) turn_pairs(one, i + 1, i, i + 1);
}

// to ← scale × a row's dimensions starting at `first`.
template <DType kType>
HWY_INLINE void StageRow(const Stored<kType>* from, float scale, int32_t first, int32_t dim, float* to) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> one;
  const auto step = static_cast<int32_t>(hn::Lanes(d));
  int32_t i = first;
  for (; i + step <= dim; i += step) {
    hn::StoreU(hn::Mul(LoadElements<kType>(d, from + i), hn::Set(d, scale)), d, to + i);
  }
  for (; i < dim; ++i) {
    hn::StoreU(hn::Mul(LoadElements<kType>(one, from + i), hn::Set(one, scale)), one, to + i);
  }
}

// Rows of fp32, `stride` apart, rotated by `angles` unless null.
template <DType kType>
void StageRows(const RawRows& raw, size_t count, int32_t dim, const KeyAngles* angles, float* to, size_t stride) {
  for (size_t j = 0; j < count; ++j, to += stride) {
    const auto* const row = reinterpret_cast<const Stored<kType>*>(raw.row[j]);
    if (angles != nullptr) StageTurned<kType>(*angles, j, row, raw.scale[j], to);
    StageRow<kType>(row, raw.scale[j], angles == nullptr ? 0 : angles->rotary_dim(), dim, to);
  }
}

using StageFunction = void (*)(const RawRows&, size_t, int32_t, const KeyAngles*, float*, size_t);

inline StageFunction StageFunctionOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return StageRows<DType::kF16>;
    case DType::kBF16:
      return StageRows<DType::kBF16>;
    case DType::kF8E4M3:
      return StageRows<DType::kF8E4M3>;
    case DType::kF8E5M2:
      return StageRows<DType::kF8E5M2>;
    default:
      return StageRows<DType::kF32>;
  }
}

}  // namespace attention
}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();
#endif  // per-target guard
