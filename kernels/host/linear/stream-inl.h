// SPDX-License-Identifier: Apache-2.0
// Chains of interiors alone whose transitions are decays: S ← D ⊙ S + S_C, one pass over memory and nothing else to do.
// States are taken as they lie, in either order. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_STREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_STREAM_INL_H_
#undef ASHLAR_KERNELS_HOST_STREAM_INL_H_
#else
#define ASHLAR_KERNELS_HOST_STREAM_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "hwy/cache_control.h"
#include "kernels/host/linear/chain.h"
#include "kernels/host/linear/decay-inl.h"
#include "kernels/host/simd/matrix-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// Rows of S that pass through the whole chain together, in floats: they and two tuples' rows stay in the nearest cache.
constexpr size_t kSliceFloats = 4096;

// Streaming mixes rows. If keys rotate, panels are faster.
inline bool IsStream(const Chain& chain) {
  return chain.form() != TransitionForm::kDense && chain.steps.empty() &&
         chain.shape.rotation.style == RopeStyle::kNone;
}

struct StreamScratch {
  static constexpr size_t kFloats = RoundUp(kMaxHeadDim, kLanes) * kMaxHeadDim;
  HWY_ALIGN float state[kFloats];
  HWY_ALIGN float table[kFloats];                         // mamba1: the decay table, in the state's order
  HWY_ALIGN float factors[RoundUp(kMaxHeadDim, kLanes)];  // decays of rows or of columns; mamba1: Σ dt
};

// One head of a chain. Rows and columns are those of memory.
class Stream {
 public:
  Stream(const Chain& chain, size_t head, StreamScratch& scratch)
      : chain_(chain),
        head_(head),
        scratch_(scratch),
        key_first_(chain.shape.order == StateOrder::kKeyFirst),
        rows_(static_cast<size_t>(key_first_ ? chain.shape.d_k : chain.shape.d_v)),
        columns_(static_cast<size_t>(key_first_ ? chain.shape.d_v : chain.shape.d_k)),
        stride_(RoundUp(columns_, kLanes)),
        log_bytes_(LogCount(chain.shape) * sizeof(float)) {}

  void Run() {
    Start();
    const size_t slice = std::max<size_t>(1, kSliceFloats / stride_);
    for (size_t begin = 0; begin < rows_; begin += slice) {
      const size_t end = std::min(rows_, begin + slice);
      for (size_t i = 0; i < chain_.interiors.size(); ++i) {
        // Meanwhile the next rows are prefetched: the same rows of the next tuple, or the following rows of the first
        // tuple.
        const bool last = i + 1 == chain_.interiors.size();
        Compose(chain_.interiors[i], begin, end, chain_.interiors[last ? 0 : i + 1], last ? end : begin);
      }
    }
    Store();
  }

 private:
  static constexpr size_t kLine = 64;

  void Start() {
    const StateView& state = chain_.state;
    if (chain_.resume) {
      const float scale = state.exponents == nullptr ? 1.0f : std::ldexp(1.0f, state.exponents[head_]);
      WithElements(state.dtype, [&](auto e) HWY_ATTR {
        using E = decltype(e);
        for (size_t r = 0; r < rows_; ++r) {
          Widen<E>(Elements<E>(state.heads[head_], r * columns_), columns_, scale, scratch_.state + r * stride_);
        }
      });
    } else {
      std::fill(scratch_.state, scratch_.state + rows_ * stride_, 0.0f);
    }
    if (chain_.form() != TransitionForm::kElementwise) return;
    const auto d_k = static_cast<size_t>(chain_.shape.d_k), d_v = static_cast<size_t>(chain_.shape.d_v);
    const float* table = chain_.shape.decay_table + head_ * d_k * d_v;
    if (!key_first_) return Transpose(table, d_v, d_v, d_k, scratch_.table, stride_);
    for (size_t r = 0; r < d_k; ++r) std::copy_n(table + r * d_v, d_v, scratch_.table + r * stride_);
  }

  void Store() {
    const StateView& to = chain_.state;
    int exponent = 0;
    if (to.dtype == DType::kF16) {
      Vec largest = hn::Zero(Tag());
      for (size_t r = 0; r < rows_; ++r) largest = LargestOf(scratch_.state + r * stride_, columns_, largest);
      to.exponents[head_] = exponent = HalfExponent(hn::GetLane(hn::MaxOfLanes(Tag(), largest)));
    }
    WithElements(to.dtype, [&](auto e) HWY_ATTR {
      using E = decltype(e);
      for (size_t r = 0; r < rows_; ++r) {
        Narrow<E>(scratch_.state + r * stride_, columns_, std::ldexp(1.0f, -exponent),
                  Elements<E>(to.heads[head_], r * columns_));
      }
    });
    if (chain_.transition != nullptr) SumLogs(chain_, head_, static_cast<float*>(chain_.transition[head_]));
  }

  void Compose(const TupleView& tuple, size_t begin, size_t end, const TupleView& next_tuple, size_t next_begin) {
    const auto* logs = static_cast<const char*>(next_tuple.heads[head_].transition);
    for (size_t byte = 0; logs != nullptr && byte < log_bytes_; byte += kLine) hwy::Prefetch(logs + byte);
    WithElements(tuple.state_dtype, [&](auto e) HWY_ATTR {
      const char* ahead = static_cast<const char*>(next_tuple.heads[head_].state) +
                          next_begin * columns_ * ElementBytes(next_tuple.state_dtype);
      ComposeElements<decltype(e)>(tuple.heads[head_], begin, end, next_begin < rows_ ? ahead : nullptr);
    });
  }

  template <class E>
  void ComposeElements(const HeadTuple& tuple, size_t begin, size_t end, const char* ahead) {
    const auto* logs = static_cast<const float*>(tuple.transition);
    float* factors = scratch_.factors;
    // `decay_of_row(r)` computes from a column the factor of a vector of the state there.
    const auto run = [&](const auto& decay_of_row) HWY_ATTR {
      const float scale = tuple.state_exponent == 0 ? 1.0f : std::ldexp(1.0f, tuple.state_exponent);
      const auto* from = Elements<E>(tuple.state);
      for (size_t r = begin; r < end; ++r) {
        AddRow<E>(from + r * columns_, scale, decay_of_row(r), scratch_.state + r * stride_, ahead);
        if (ahead != nullptr) ahead += columns_ * sizeof(typename E::Stored);
      }
    };
    const auto by_row = [&](size_t r) HWY_ATTR {
      const Vec factor = hn::Set(Tag(), factors[r]);
      return [factor](size_t) HWY_ATTR { return factor; };
    };
    const auto by_column = [&](size_t)
                               HWY_ATTR { return [&](size_t c) HWY_ATTR { return hn::Load(Tag(), factors + c); }; };
    switch (tuple.form) {
      case TransitionForm::kScalar:
        std::fill(factors + begin, factors + end, DecayOf(double{logs[0]}));
        return run(by_row);
      case TransitionForm::kDiagonal:
        DecaysOf(logs, static_cast<size_t>(chain_.shape.d_k), factors);
        return key_first_ ? run(by_row) : run(by_column);
      case TransitionForm::kElementwise:
        return RunElementwise(logs, run);
      default:  // zero: the previous state is gone, whatever it was
        std::fill(scratch_.state + begin * stride_, scratch_.state + end * stride_, 0.0f);
        std::fill(factors + begin, factors + end, 0.0f);
        return run(by_row);
    }
  }

  template <typename Run>
  void RunElementwise(const float* dt, const Run& run) {
    float* padded = scratch_.factors;
    const auto d_v = static_cast<size_t>(chain_.shape.d_v);
    std::fill(std::copy_n(dt, d_v, padded), padded + RoundUp(d_v, kLanes), 0.0f);
    if (key_first_) {
      return run([&](size_t r) HWY_ATTR {
        const float* table = scratch_.table + r * stride_;
        return [=](size_t c) HWY_ATTR { return ElementDecay(hn::Load(Tag(), table + c), hn::Load(Tag(), padded + c)); };
      });
    }
    run([&](size_t r) HWY_ATTR {
      const float* table = scratch_.table + r * stride_;
      const Vec time = hn::Set(Tag(), padded[r]);
      return [=](size_t c) HWY_ATTR { return ElementDecay(hn::Load(Tag(), table + c), time); };
    });
  }

  // state ← decay ⊙ state + scale × from, for one row.
  template <class E, typename Decay>
  HWY_INLINE void AddRow(const typename E::Stored* HWY_RESTRICT from, float scale, const Decay& decay,
                         float* HWY_RESTRICT state, const char* ahead) const {
    const Vec scales = hn::Set(Tag(), scale);
    const auto add = [&](Vec numbers, size_t c) HWY_ATTR {
      const Vec old = hn::Mul(decay(c), hn::Load(Tag(), state + c));
      hn::Store(hn::MulAdd(scales, numbers, old), Tag(), state + c);
    };
    for (size_t byte = 0; ahead != nullptr && byte < columns_ * sizeof(typename E::Stored); byte += kLine) {
      hwy::Prefetch(ahead + byte);
    }
    size_t c = 0;
    for (; c + 4 * kLanes <= columns_; c += 4 * kLanes) {
      for (size_t n = 0; n < 4; ++n) add(E::Load(from + c + n * kLanes), c + n * kLanes);
    }
    for (; c + kLanes <= columns_; c += kLanes) add(E::Load(from + c), c);
    if (c < columns_) add(LoadPart<E>(from + c, columns_ - c), c);
  }

  const Chain& chain_;
  const size_t head_;
  StreamScratch& scratch_;
  const bool key_first_;
  const size_t rows_, columns_, stride_, log_bytes_;
};

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
