// SPDX-License-Identifier: Apache-2.0
// Rotates a cached end state to its segment's position: S_{C|p} = R(p) S_{C|0} on the key axis, which is the rows of a
// panel. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_TURN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_TURN_INL_H_
#undef ASHLAR_KERNELS_HOST_TURN_INL_H_
#else
#define ASHLAR_KERNELS_HOST_TURN_INL_H_
#endif

#include <cmath>
#include <numbers>

#include "hwy/contrib/math/math-inl.h"
#include "kernels/host/simd/panel-inl.h"
#include "kernels/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

struct Turn {
  static constexpr size_t kMaxPairs = kMaxHeadDim / 2;
  size_t pairs = 0;  // 0: no rotation
  bool half_split = false;
  HWY_ALIGN float cosine[kMaxPairs], sine[kMaxPairs];

  // Angles are computed in fp64 and reduced near zero there, because the vector functions lose digits of large ones.
  void Fill(const Rotation& rotation, int64_t position) {
    pairs = rotation.style == RopeStyle::kNone ? 0 : static_cast<size_t>(rotation.rotary_dim / 2);
    half_split = rotation.style == RopeStyle::kHalfSplit;
    const hn::ScalableTag<double> d;
    const size_t lanes = hn::Lanes(d);
    for (size_t i = 0; i < pairs; i += lanes) {
      HWY_ALIGN double angles[hn::MaxLanes(d)] = {}, cosines[hn::MaxLanes(d)], sines[hn::MaxLanes(d)];
      const size_t count = std::min(lanes, pairs - i);
      for (size_t j = 0; j < count; ++j) {
        angles[j] = std::remainder(static_cast<double>(position) * rotation.frequencies[i + j], 2 * std::numbers::pi);
      }
      hn::Store(hn::Cos(d, hn::Load(d, angles)), d, cosines);
      hn::Store(hn::Sin(d, hn::Load(d, angles)), d, sines);
      for (size_t j = 0; j < count; ++j) {
        cosine[i + j] = static_cast<float>(cosines[j]);
        sine[i + j] = static_cast<float>(sines[j]);
      }
    }
  }

  void Apply(float* HWY_RESTRICT panel) const {
    for (size_t i = 0; i < pairs; ++i) {
      float* HWY_RESTRICT first = panel + (half_split ? i : 2 * i) * kWidth;
      float* HWY_RESTRICT second = panel + (half_split ? i + pairs : 2 * i + 1) * kWidth;
      const Vec c = hn::Set(Tag(), cosine[i]), s = hn::Set(Tag(), sine[i]);
      for (size_t n = 0; n < kWidth; n += kLanes) {
        const Vec x = hn::Load(Tag(), first + n), y = hn::Load(Tag(), second + n);
        hn::Store(hn::NegMulAdd(y, s, hn::Mul(x, c)), Tag(), first + n);
        hn::Store(hn::MulAdd(x, s, hn::Mul(y, c)), Tag(), second + n);
      }
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
