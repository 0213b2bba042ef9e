// SPDX-License-Identifier: Apache-2.0
// Runs of tokens of mamba1, whose decay differs from element to element: token by token, a panel at a time.
// Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_ELEMENTWISE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_ELEMENTWISE_INL_H_
#undef ASHLAR_KERNELS_HOST_ELEMENTWISE_INL_H_
#else
#define ASHLAR_KERNELS_HOST_ELEMENTWISE_INL_H_
#endif

#include <algorithm>

#include "kernels/host/linear/decay-inl.h"
#include "kernels/host/simd/matrix-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// One token from the view of a panel of some value columns.
struct ElementToken {
  const float *q, *k;     // [d_k]; q null: no output
  const float *v, *beta;  // [columns]; beta: dt
  float* out;             // [columns]
};

// X ← e^{table dt} ⊙ X + k (dt ⊙ v)ᵀ, out = Xᵀ q. Panels are [d_k][kWidth].
HWY_NOINLINE void AdvanceElement(const ElementToken& token, size_t d_k, size_t columns, const float* HWY_RESTRICT table,
                                 float* HWY_RESTRICT panel) {
  for (size_t j = 0; j < columns; j += kLanes) {
    const size_t count = std::min(kLanes, columns - j);
    const auto load = [&](const float* from)
                          HWY_ATTR { return count == kLanes ? F32::Load(from + j) : LoadPart<F32>(from + j, count); };
    const Vec dt = load(token.beta), write = hn::Mul(dt, load(token.v));
    Vec out = hn::Zero(Tag());
    for (size_t i = 0; i < d_k; ++i) {
      const Vec decay = DecayOf(hn::Mul(hn::Load(Tag(), table + i * kWidth + j), dt));
      const Vec old = hn::Mul(decay, hn::Load(Tag(), panel + i * kWidth + j));
      const Vec next = Vanish(hn::MulAdd(hn::Set(Tag(), token.k[i]), write, old));
      hn::Store(next, Tag(), panel + i * kWidth + j);
      if (token.q != nullptr) out = hn::MulAdd(hn::Set(Tag(), token.q[i]), next, out);
    }
    if (token.q == nullptr) continue;
    if (count == kLanes) {
      F32::Store(out, token.out + j);
    } else {
      StorePart<F32>(out, token.out + j, count);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
