// SPDX-License-Identifier: Apache-2.0
// Few tokens: the recurrence in place, with two passes over a head's state per token. Decoding is one token per call.
// Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_STEP_INL_H_
#undef ASHLAR_KERNELS_HOST_STEP_INL_H_
#else
#define ASHLAR_KERNELS_HOST_STEP_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/highway.h"
#include "kernels/host/linear/chain.h"
#include "kernels/host/linear/decay-inl.h"
#include "kernels/host/simd/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// One token of one value head. Sizes as in LinearShape.
struct StepToken {
  const float *q, *k, *v;          // q null: no output
  const float *decay, *decayed_k;  // [d_k]: e^g and e^g ⊙ k
  float beta;
  bool erases;
  float* out;  // null: no output
};

// S [d_k, d_v]: y = β (v − (diag(e^g) S)ᵀ k), S ← diag(e^g) S + k yᵀ, out = Sᵀ q; families that do not erase have y = β
// v. Plain loops, which compilers vectorise.
HWY_INLINE void StepKeyFirst(const StepToken& token, size_t d_k, size_t d_v, float* HWY_RESTRICT state) {
  float y[kMaxHeadDim] = {}, out[kMaxHeadDim] = {};
  for (size_t i = 0; token.erases && i < d_k; ++i) {
    const float* HWY_RESTRICT row = state + i * d_v;
    const float key = token.decayed_k[i];
    for (size_t j = 0; j < d_v; ++j) y[j] += key * row[j];
  }
  for (size_t j = 0; j < d_v; ++j) y[j] = token.beta * (token.v[j] - y[j]);
  for (size_t i = 0; i < d_k; ++i) {
    float* HWY_RESTRICT row = state + i * d_v;
    const float key = token.k[i], query = token.out == nullptr ? 0.0f : token.q[i], decay = token.decay[i];
    for (size_t j = 0; j < d_v; ++j) {
      row[j] = decay * row[j] + key * y[j];
      out[j] += query * row[j];
    }
  }
  if (token.out != nullptr) std::copy_n(out, d_v, token.out);
}

// row ← decay ⊙ row + factor k; returns the sum of q ⊙ row.
HWY_INLINE float AddAndDot(const float* HWY_RESTRICT decay, float factor, const float* HWY_RESTRICT k,
                           const float* HWY_RESTRICT q, size_t n, float* HWY_RESTRICT row) {
  const Vec factors = hn::Set(Tag(), factor);
  Vec sums = hn::Zero(Tag());
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec old = hn::Mul(hn::LoadU(Tag(), decay + i), hn::LoadU(Tag(), row + i));
    const Vec next = hn::MulAdd(factors, hn::LoadU(Tag(), k + i), old);
    hn::StoreU(next, Tag(), row + i);
    sums = hn::MulAdd(hn::LoadU(Tag(), q + i), next, sums);
  }
  float sum = hn::GetLane(hn::SumOfLanes(Tag(), sums));
  for (; i < n; ++i) {
    row[i] = decay[i] * row[i] + factor * k[i];
    sum += q[i] * row[i];
  }
  return sum;
}

HWY_INLINE float Dot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, size_t n) {
  Vec sums = hn::Zero(Tag());
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sums = hn::MulAdd(hn::LoadU(Tag(), a + i), hn::LoadU(Tag(), b + i), sums);
  float sum = hn::GetLane(hn::SumOfLanes(Tag(), sums));
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// The same with Sᵀ [d_v, d_k]: a row at a time.
HWY_INLINE void StepValueFirst(const StepToken& token, size_t d_k, size_t d_v, float* HWY_RESTRICT state) {
  const float* query = token.out == nullptr ? token.k : token.q;
  for (size_t j = 0; j < d_v; ++j) {
    float* row = state + j * d_k;
    const float y = token.beta * (token.v[j] - (token.erases ? Dot(token.decayed_k, row, d_k) : 0.0f));
    const float out = AddAndDot(token.decay, y, token.k, query, d_k, row);
    if (token.out != nullptr) token.out[j] = out;
  }
}

// Up to this number of tokens the recurrence is faster than a chunk: it reads the state once per token, but copies
// nothing.
constexpr int64_t kFewTokens = 3;

// Returns whether a chain is so short that it is computed in place; the stored state then has the type of the sums.
inline bool IsFewTokens(const Chain& chain) {
  if (chain.form() == TransitionForm::kElementwise || chain.state.dtype != DType::kF32) return false;
  if (!chain.resume || !chain.interiors.empty() || chain.steps.size() != 1) return false;
  const SeamStep& step = chain.steps.front();
  return step.interior == nullptr && step.checkpoint == nullptr && step.end - step.begin <= kFewTokens;
}

inline void StepHead(const Chain& chain, size_t head) {
  const LinearShape& shape = chain.shape;
  const TokenInputs& inputs = chain.inputs;
  const size_t d_k = static_cast<size_t>(shape.d_k), d_v = static_cast<size_t>(shape.d_v);
  const size_t key = head / static_cast<size_t>(shape.heads / shape.key_heads) * d_k, value = head * d_v;
  HWY_ALIGN float decay[RoundUp(kMaxHeadDim, kLanes)], decayed_k[kMaxHeadDim];
  for (int64_t t = chain.steps.front().begin; t < chain.steps.front().end; ++t) {
    const float* k = inputs.k + t * inputs.k_stride + key;
    if (DecaysPerKey(shape.family)) {
      DecaysOf(GateRow(shape, inputs, t, head), d_k, decay);
    } else {
      std::fill(decay, decay + d_k, DecayOf(LogDecay(shape, inputs, t, head)));
    }
    for (size_t i = 0; i < d_k; ++i) decayed_k[i] = decay[i] * k[i];
    const StepToken token{
        .q = chain.out == nullptr ? nullptr : inputs.q + t * inputs.q_stride + key,
        .k = k,
        .v = inputs.v + t * inputs.v_stride + value,
        .decay = decay,
        .decayed_k = decayed_k,
        .beta = BetaOf(shape, inputs, t, head),
        .erases = Erases(shape.family),
        .out = chain.out == nullptr ? nullptr : chain.out + t * chain.out_stride + value,
    };
    if (shape.order == StateOrder::kKeyFirst) {
      StepKeyFirst(token, d_k, d_v, static_cast<float*>(chain.state.heads[head]));
    } else {
      StepValueFirst(token, d_k, d_v, static_cast<float*>(chain.state.heads[head]));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
