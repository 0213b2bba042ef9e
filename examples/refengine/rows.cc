// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/rows.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "examples/refengine/rows.cc"
// Highway wants this order.
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "hwy/contrib/math/math-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace ashlar::refengine::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Calls body(tag, i) for whole vectors, then one number at a time for the rest.
template <class Body>
HWY_INLINE void ForVectors(int64_t n, Body&& body) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(d, i);
  for (; i < n; ++i) body(hn::CappedTag<float, 1>(), i);
}

template <class D, class V>
HWY_INLINE V Sigmoid(D d, V x) {
  const auto one = hn::Set(d, 1.0f);
  const auto bounded = hn::Min(hn::Neg(x), hn::Set(d, 88.0f));  // e^88 is finite; Highway's Exp is wrong from 104 on
  return hn::Div(one, hn::Add(one, hn::Exp(d, bounded)));
}

HWY_INLINE float SumOfSquares(const float* x, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::LoadU(d, x + i);
    sum = hn::MulAdd(v, v, sum);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < n; ++i) total += x[i] * x[i];
  return total;
}

void RmsNormT(const float* x, const float* weight, float epsilon, int64_t n, float* out) {
  const float scale = 1.0f / std::sqrt(SumOfSquares(x, n) / n + epsilon);
  ForVectors(n, [&](auto d, int64_t i) HWY_ATTR {
    const auto v = hn::Mul(hn::LoadU(d, x + i), hn::Set(d, scale));
    hn::StoreU(hn::Mul(v, hn::LoadU(d, weight + i)), d, out + i);
  });
}

void ScaleT(float* x, float scale, int64_t n) {
  ForVectors(
      n, [&](auto d, int64_t i) HWY_ATTR { hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, scale)), d, x + i); });
}

void L2NormalizeT(float* x, float scale, int64_t n) {
  constexpr float kEpsilon = 1e-6f;  // as in the published kernels: x / √(‖x‖² + ε)
  ScaleT(x, scale / std::sqrt(SumOfSquares(x, n) + kEpsilon), n);
}

void GatedRmsNormT(const float* x, const float* z, const float* weight, float epsilon, int64_t n, float* out) {
  const float scale = 1.0f / std::sqrt(SumOfSquares(x, n) / n + epsilon);
  ForVectors(n, [&](auto d, int64_t i) HWY_ATTR {
    const auto gate = hn::LoadU(d, z + i);
    const auto v = hn::Mul(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, scale)), hn::LoadU(d, weight + i));
    hn::StoreU(hn::Mul(v, hn::Mul(gate, Sigmoid(d, gate))), d, out + i);
  });
}

void SwiGluT(const float* gate, const float* up, int64_t n, float* out) {
  ForVectors(n, [&](auto d, int64_t i) HWY_ATTR {
    const auto g = hn::LoadU(d, gate + i);
    hn::StoreU(hn::Mul(hn::Mul(g, Sigmoid(d, g)), hn::LoadU(d, up + i)), d, out + i);
  });
}

void SigmoidGateT(float* x, const float* gate, float scale, int64_t n) {
  ForVectors(n, [&](auto d, int64_t i) HWY_ATTR {
    const auto g = hn::Mul(Sigmoid(d, hn::LoadU(d, gate + i)), hn::Set(d, scale));
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), g), d, x + i);
  });
}

void ConvolveSiluT(const float* const* inputs, const float* weight, int32_t kernel, int64_t channels, float* out) {
  ForVectors(channels, [&](auto d, int64_t i) HWY_ATTR {
    auto sum = hn::Zero(d);
    for (int32_t j = 0; j < kernel; ++j) {
      sum = hn::MulAdd(hn::LoadU(d, weight + j * channels + i), hn::LoadU(d, inputs[j] + i), sum);
    }
    hn::StoreU(hn::Mul(sum, Sigmoid(d, sum)), d, out + i);
  });
}

void RotateHalfSplitT(float* x, const float* cosines, const float* sines, int64_t pairs) {
  ForVectors(pairs, [&](auto d, int64_t i) HWY_ATTR {
    const auto c = hn::LoadU(d, cosines + i), s = hn::LoadU(d, sines + i);
    const auto first = hn::LoadU(d, x + i), second = hn::LoadU(d, x + pairs + i);
    hn::StoreU(hn::Sub(hn::Mul(first, c), hn::Mul(second, s)), d, x + i);
    hn::StoreU(hn::Add(hn::Mul(second, c), hn::Mul(first, s)), d, x + pairs + i);
  });
}

float OnlineSoftmaxT(float* scores, int64_t visible, int64_t n, float& max, float& sum) {
  std::fill(scores + visible, scores + n, 0.0f);
  if (visible == 0) return 1.0f;
  const hn::ScalableTag<float> d;
  const int64_t lanes = hn::Lanes(d);
  auto greatest = hn::Set(d, max);
  int64_t i = 0;
  for (; i + lanes <= visible; i += lanes) greatest = hn::Max(greatest, hn::LoadU(d, scores + i));
  float new_max = hn::GetLane(hn::MaxOfLanes(d, greatest));
  for (; i < visible; ++i) new_max = std::max(new_max, scores[i]);

  const float rescale = std::exp(max - new_max);  // e^{−∞} = 0 for the first block
  auto partial = hn::Zero(d);
  float rest = 0;
  ForVectors(visible, [&](auto tag, int64_t j) HWY_ATTR {
    const auto weight = hn::Exp(tag, hn::Sub(hn::LoadU(tag, scores + j), hn::Set(tag, new_max)));
    hn::StoreU(weight, tag, scores + j);
    if constexpr (std::is_same_v<decltype(tag), hn::ScalableTag<float>>) {
      partial = hn::Add(partial, weight);
    } else {
      rest += hn::GetLane(weight);
    }
  });
  sum = sum * rescale + hn::GetLane(hn::SumOfLanes(d, partial)) + rest;
  max = new_max;
  return rescale;
}

}  // namespace ashlar::refengine::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ashlar::refengine {

HWY_EXPORT(RmsNormT);
HWY_EXPORT(L2NormalizeT);
HWY_EXPORT(GatedRmsNormT);
HWY_EXPORT(SwiGluT);
HWY_EXPORT(SigmoidGateT);
HWY_EXPORT(ConvolveSiluT);
HWY_EXPORT(RotateHalfSplitT);
HWY_EXPORT(OnlineSoftmaxT);
HWY_EXPORT(ScaleT);

void RmsNorm(const float* x, const float* weight, float epsilon, int64_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(RmsNormT)(x, weight, epsilon, n, out);
}
void L2Normalize(float* x, float scale, int64_t n) {
  HWY_DYNAMIC_DISPATCH(L2NormalizeT)(x, scale, n);
}
void GatedRmsNorm(const float* x, const float* z, const float* weight, float epsilon, int64_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(GatedRmsNormT)(x, z, weight, epsilon, n, out);
}
void SwiGlu(const float* gate, const float* up, int64_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(SwiGluT)(gate, up, n, out);
}
void SigmoidGate(float* x, const float* gate, float scale, int64_t n) {
  HWY_DYNAMIC_DISPATCH(SigmoidGateT)(x, gate, scale, n);
}
void ConvolveSilu(const float* const* inputs, const float* weight, int32_t kernel, int64_t channels, float* out) {
  HWY_DYNAMIC_DISPATCH(ConvolveSiluT)(inputs, weight, kernel, channels, out);
}
void RotateHalfSplit(float* x, const float* cosines, const float* sines, int64_t pairs) {
  HWY_DYNAMIC_DISPATCH(RotateHalfSplitT)(x, cosines, sines, pairs);
}
float OnlineSoftmax(float* scores, int64_t visible, int64_t n, float& max, float& sum) {
  return HWY_DYNAMIC_DISPATCH(OnlineSoftmaxT)(scores, visible, n, max, sum);
}
void Scale(float* x, float scale, int64_t n) {
  HWY_DYNAMIC_DISPATCH(ScaleT)(x, scale, n);
}

}  // namespace ashlar::refengine
#endif
