// SPDX-License-Identifier: Apache-2.0
// Decays: exponentials of their logarithms, and sums of these along a chain. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_DECAY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_DECAY_INL_H_
#undef ASHLAR_KERNELS_HOST_DECAY_INL_H_
#else
#define ASHLAR_KERNELS_HOST_DECAY_INL_H_
#endif

#include <cmath>
#include <limits>

#include "kernels/host/linear/chain.h"
#include "kernels/host/simd/matrix-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// A smaller decay counts as zero: it has no visible effect, and denormal numbers are a hundred times slower. The
// comparison keeps NaN, which is not below anything.
constexpr float kVanished = 1e-30f;
constexpr float kVanishedLog = -69.0f;

HWY_INLINE Vec Vanish(Vec v) {
  return hn::IfThenZeroElse(hn::Le(hn::Abs(v), hn::Set(Tag(), kVanished)), v);
}

// e^x; 0 if that has vanished; NaN if x is NaN. Accurate to about an ulp for decays' x, which are not positive, in a
// third of the time of Highway's general Exp. The polynomial and the two-part ln 2 are from Cephes.
HWY_INLINE Vec DecayOf(Vec log) {
  const Tag d;
  const hn::RebindToSigned<Tag> integers;
  // x = n ln 2 + r, |r| ≤ ln 2 / 2. Added to 1.5 × 2^23, n is an integer in the lowest bits.
  const Vec magic = hn::Set(d, 0x1.8p23f), shifted = hn::MulAdd(log, hn::Set(d, 1.44269504f), magic);
  const Vec n = hn::Sub(shifted, magic);
  const Vec r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), hn::NegMulAdd(n, hn::Set(d, 0.693359375f), log));
  Vec p = hn::MulAdd(hn::Set(d, 1.9875691500e-4f), r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(integers, shifted));
  const Vec decay = hn::BitCast(d, hn::Add(hn::BitCast(integers, p), exponent));
  // Eq, since this Highway's Ne is false of NaN on some targets.
  const Vec nan_or_gone = hn::IfThenZeroElse(hn::Eq(log, log), log);
  return hn::IfThenElse(hn::Gt(log, hn::Set(d, kVanishedLog)), decay, nan_or_gone);
}
inline float DecayOf(double log) {
  return log <= kVanishedLog ? 0.0f : static_cast<float>(std::exp(log));
}

// e^{table × dt}; 0 where Σ dt is infinite, that is, a transition of zero was met, also where the table is zero.
HWY_INLINE Vec ElementDecay(Vec table, Vec dt) {
  const auto gone = hn::Eq(dt, hn::Set(Tag(), std::numeric_limits<float>::infinity()));
  return hn::IfThenZeroElse(gone, DecayOf(hn::Mul(table, dt)));
}

// to[i] ← e^{logs[i]} for i < n, rounded up to whole vectors; the padding is 1.
HWY_INLINE void DecaysOf(const float* HWY_RESTRICT logs, size_t n, float* HWY_RESTRICT to) {
  for (size_t i = 0; i < n; i += kLanes) {
    hn::Store(DecayOf(i + kLanes <= n ? F32::Load(logs + i) : LoadPart<F32>(logs + i, n - i)), Tag(), to + i);
  }
}

// Returns whether every key of a head has its own decay.
constexpr bool DecaysPerKey(Family family) {
  return family == Family::kGla || family == Family::kKda;
}

// Log decay of a token if one number describes the whole head.
inline double LogDecay(const LinearShape& shape, const TokenInputs& inputs, int64_t t, size_t head) {
  switch (shape.family) {
    case Family::kRetnet:
    case Family::kLightning:
      return shape.decay_table[head];
    case Family::kMamba2:
      return double{shape.decay_table[head]} * inputs.beta[t * inputs.beta_stride + static_cast<int64_t>(head)];
    case Family::kGdn:
      return inputs.g[t * inputs.g_stride + static_cast<int64_t>(head)];
    default:
      return 0;
  }
}

// β of a token, the factor of its write.
inline float BetaOf(const LinearShape& shape, const TokenInputs& inputs, int64_t t, size_t head) {
  return BetaWidth(shape) == 0 ? 1.0f : inputs.beta[t * inputs.beta_stride + static_cast<int64_t>(head)];
}

// One token's log decays of a head with a decay per key (gla, kda), or a channel's dt (mamba1).
inline const float* GateRow(const LinearShape& shape, const TokenInputs& inputs, int64_t t, size_t head) {
  const auto h = static_cast<int64_t>(head);
  return shape.family == Family::kMamba1 ? inputs.beta + t * inputs.beta_stride + h * shape.d_v
                                         : inputs.g + t * inputs.g_stride + h * shape.d_k;
}

// Returns how many numbers a transition has that is not a matrix.
inline size_t LogCount(const LinearShape& shape) {
  const TransitionForm form = NaturalForm(shape.family);
  if (form == TransitionForm::kScalar) return 1;
  return static_cast<size_t>(form == TransitionForm::kDiagonal ? shape.d_k : shape.d_v);
}

// The transition of a chain whose product is not a matrix: sums of logarithms (mamba1: of dt), for one head. After a
// transition of zero the sums are infinite, and stay so.
inline void SumLogs(const Chain& chain, size_t head, float* to) {
  const LinearShape& shape = chain.shape;
  const TransitionForm form = chain.form();
  const size_t n = LogCount(shape);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double gone = form == TransitionForm::kElementwise ? kInfinity : -kInfinity;
  double sums[kMaxHeadDim] = {};
  const auto add = [&](const float* logs) {
    for (size_t i = 0; i < n; ++i) sums[i] += logs[i];
  };
  for (const TupleView& interior : chain.interiors) {
    const HeadTuple& tuple = interior.heads[head];
    if (tuple.form == TransitionForm::kZero) {
      for (size_t i = 0; i < n; ++i) sums[i] += gone;
    } else {
      add(static_cast<const float*>(tuple.transition));
    }
  }
  for (const SeamStep& run : chain.steps) {
    for (int64_t t = run.begin; t < run.end; ++t) {
      if (form == TransitionForm::kScalar) {
        sums[0] += LogDecay(shape, chain.inputs, t, head);
      } else {
        add(GateRow(shape, chain.inputs, t, head));
      }
    }
  }
  for (size_t i = 0; i < n; ++i) to[i] = static_cast<float>(sums[i]);
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
