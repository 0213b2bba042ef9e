// One head's transition of a cached interior, in whatever form it is stored, acting on panels of X.
// Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_COMPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_COMPOSE_INL_H_
#undef ASHLAR_KERNELS_HOST_COMPOSE_INL_H_
#else
#define ASHLAR_KERNELS_HOST_COMPOSE_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "kernels/host/chunk-inl.h"
#include "kernels/host/decay-inl.h"
#include "kernels/host/matrix-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// What a head's transition takes in memory.
inline size_t TransitionBytes(const LinearShape& shape, const TupleView& tuple, size_t head) {
  const auto d_k = static_cast<size_t>(shape.d_k), element = ElementBytes(tuple.transition_dtype);
  const HeadTuple& stored = tuple.heads[head];
  switch (stored.form) {
    case TransitionForm::kDense:
      return d_k * d_k * element;
    case TransitionForm::kLowRank:
      return d_k * sizeof(float) + 2 * static_cast<size_t>(stored.rank) * d_k * element;
    default:
      return 0;  // a few lines at most, which nobody need fetch ahead
  }
}

// Memory that will be read next, on its way while the present is computed, a part at a time.
struct Ahead {
  static constexpr size_t kLine = 64;
  const char* from = nullptr;
  size_t left = 0, part = 0;  // bytes

  Ahead() = default;
  Ahead(const void* first, size_t bytes, size_t parts)
      : from(static_cast<const char*>(first)), left(bytes), part(RoundUp((bytes + parts - 1) / parts, kLine)) {}

  HWY_INLINE void Fetch() {
    const char* const end = from + std::min(part, left);
    left -= static_cast<size_t>(end - from);
    // Not into the nearest cache, which the product needs.
    for (; from < end; from += kLine) __builtin_prefetch(from, 0, 2);
  }
};
// Parts are to lie evenly in the work: a core has few buffers for misses, and those that wait for memory keep the
// product from what lies in the second cache.
struct AheadTuple {
  Ahead transition, state;

  HWY_INLINE void Fetch() {
    transition.Fetch();
    state.Fetch();
  }
};

class HeadTransition {
 public:
  // Reads head `head` of a tuple; what it points to must stay as it is.
  void Fill(const LinearShape& shape, const TupleView& tuple, size_t head) {
    const HeadTuple& stored = tuple.heads[head];
    form_ = stored.form;
    d_k_ = static_cast<size_t>(shape.d_k);
    key_first_ = shape.order == StateOrder::kKeyFirst;
    const auto* floats = static_cast<const float*>(stored.transition);
    switch (form_) {
      case TransitionForm::kDense:
        left_ = WithElements(tuple.transition_dtype, [&](auto e) HWY_ATTR {
          using E = decltype(e);
          return Operand::Of<E>(Elements<E>(stored.transition), d_k_, d_k_, memory_[0]);
        });
        break;
      case TransitionForm::kLowRank:
        rank_ = static_cast<size_t>(stored.rank);
        std::fill(std::copy_n(floats, d_k_, diagonal_), diagonal_ + RoundUp(d_k_, kRows), 0.0f);
        WithElements(tuple.transition_dtype, [&](auto e) HWY_ATTR {
          using E = decltype(e);
          const auto* factors = Elements<E>(floats + d_k_);
          left_ = Operand::Of<E>(factors, rank_, d_k_, memory_[0]);
          right_ = Operand::Of<E>(factors + rank_ * d_k_, rank_, d_k_, memory_[1]);
        });
        break;
      case TransitionForm::kScalar:
        std::fill(diagonal_, diagonal_ + RoundUp(d_k_, kRows), DecayOf(double{floats[0]}));
        break;
      case TransitionForm::kDiagonal:
        DecaysOf(floats, d_k_, diagonal_);
        break;
      case TransitionForm::kElementwise:
        logs_ = floats;
        table_ = shape.decay_table + head * d_k_ * static_cast<size_t>(shape.d_v);
        table_stride_ = static_cast<size_t>(shape.d_v);
        break;
      case TransitionForm::kZero:
        break;
    }
  }

  // How often Apply fetches for a block of rows.
  size_t fetches() const { return form_ == TransitionForm::kDense ? RoundUp(d_k_, kFetchDepth) / kFetchDepth : 1; }

  // next ← next + T x for a panel of X's columns [begin, begin + count).
  void Apply(size_t begin, size_t count, const float* x, float* next, AheadTuple& ahead) {
    const size_t vecs = (count + kLanes - 1) / kLanes;
    if (vecs == 1) {
      ApplyVecs<1>(begin, count, x, next, ahead);
    } else if (vecs == 2) {
      ApplyVecs<2>(begin, count, x, next, ahead);
    } else {
      ApplyVecs<kVecs>(begin, count, x, next, ahead);
    }
  }

 private:
  // A left operand of a product, fp32. Products read whole blocks of rows.
  struct Operand {
    const float* at = nullptr;
    size_t stride = 0;

    // In place where it can be read there, else a copy in `memory`.
    template <class E>
    static Operand Of(const typename E::Stored* from, size_t rows, size_t columns, float* memory) {
      if constexpr (E::kIsF32) {
        if (rows % kRows == 0 && columns % kRows == 0) return {from, columns};
      }
      const size_t stride = RoundUp(columns, kRows), all = RoundUp(rows, kRows);
      for (size_t i = 0; i < all; ++i) {
        float* row = memory + i * stride;
        if (i < rows) Widen<E>(from + i * columns, columns, 1, row);
        std::fill(i < rows ? row + columns : row, row + stride, 0.0f);
      }
      return {memory, stride};
    }
  };

  template <size_t N>
  void ApplyVecs(size_t begin, size_t count, const float* x, float* next, AheadTuple& ahead) {
    switch (form_) {
      case TransitionForm::kDense:
        return key_first_ ? Multiply<Left::kRowMajor, N>(x, next, ahead)
                          : Multiply<Left::kColumnMajor, N>(x, next, ahead);
      case TransitionForm::kLowRank:
        Reduce<N>(x);
        return ScaleRows<N>(rank_, x, next, ahead);
      case TransitionForm::kScalar:
      case TransitionForm::kDiagonal:
        return ScaleRows<N>(0, x, next, ahead);
      case TransitionForm::kElementwise:
        return ScaleElements(begin, count, x, next, ahead);
      case TransitionForm::kZero:
        for (size_t i = 0; i < d_k_; i += kRows) ahead.Fetch();
        return;
    }
  }

  // next ← next + T x, T a matrix.
  template <Left kLeft, size_t N>
  HWY_NOINLINE void Multiply(const float* x, float* next, AheadTuple& ahead) const {
    constexpr size_t kStep = kFetchDepth / 2;
    const size_t stride = left_.stride, step = kLeft == Left::kRowMajor ? 1 : stride;
    AheadTuple fetches = ahead;  // in registers
    for (size_t i = 0; i < d_k_; i += kRows) {
      Block<N> c;
      c.Load(next + i * kWidth);
      const float* a = left_.at + (kLeft == Left::kRowMajor ? i * stride : i);
      size_t k = 0;
      for (; k + kFetchDepth <= d_k_; k += kFetchDepth) {
        fetches.transition.Fetch();
        Accumulate<kLeft>(c, a + k * step, stride, x + k * kWidth, kStep);
        fetches.state.Fetch();
        Accumulate<kLeft>(c, a + (k + kStep) * step, stride, x + (k + kStep) * kWidth, kStep);
      }
      if (k < d_k_) {
        fetches.Fetch();
        Accumulate<kLeft>(c, a + k * step, stride, x + k * kWidth, d_k_ - k);
      }
      c.Store(next + i * kWidth);
    }
    ahead = fetches;
  }

  // reduced_ ← B x.
  template <size_t N>
  HWY_NOINLINE void Reduce(const float* x) {
    for (size_t i = 0; i < rank_; i += kRows) {
      Block<N> c;
      c.SetZero();
      Accumulate<Left::kRowMajor>(c, right_.at + i * right_.stride, right_.stride, x, d_k_);
      c.Store(reduced_ + i * kWidth);
    }
  }

  // next ← next + diag(diagonal_) x + Aᵀ reduced_, A of `rank` rows.
  template <size_t N>
  HWY_NOINLINE void ScaleRows(size_t rank, const float* x, float* next, AheadTuple& ahead) const {
    for (size_t i = 0; i < d_k_; i += kRows) {
      ahead.Fetch();
      Block<N> c;
      c.Load(next + i * kWidth);
      for (size_t r = 0; r < kRows; ++r) {
        const Vec factor = hn::Set(Tag(), diagonal_[i + r]);
        for (size_t n = 0; n < N; ++n) {
          c.v[r][n] = hn::MulAdd(factor, hn::Load(Tag(), x + (i + r) * kWidth + n * kLanes), c.v[r][n]);
        }
      }
      if (rank > 0) Accumulate<Left::kColumnMajor>(c, left_.at + i, left_.stride, reduced_, rank);
      c.Store(next + i * kWidth);
    }
  }

  // next ← next + e^{table ⊙ logs} ⊙ x.
  HWY_NOINLINE void ScaleElements(size_t begin, size_t count, const float* x, float* next, AheadTuple& ahead) {
    float *table = reduced_, *logs = diagonal_;
    LoadPanel<F32>(table_ + begin, table_stride_, d_k_, count, 1, table);
    std::fill(std::copy_n(logs_ + begin, count, logs), logs + kWidth, 0.0f);
    for (size_t i = 0; i < d_k_; ++i) {
      if (i % kRows == 0) ahead.Fetch();
      for (size_t n = 0; n < kWidth; n += kLanes) {
        const size_t at = i * kWidth + n;
        const Vec decay = ElementDecay(hn::Load(Tag(), table + at), hn::Load(Tag(), logs + n));
        hn::Store(hn::MulAdd(decay, hn::Load(Tag(), x + at), hn::Load(Tag(), next + at)), Tag(), next + at);
      }
    }
  }

  static constexpr size_t kFetchDepth = 8;

  TransitionForm form_ = TransitionForm::kZero;
  size_t d_k_ = 0, rank_ = 0;
  bool key_first_ = true;
  Operand left_, right_;  // dense: T; low rank: A and B
  const float *logs_ = nullptr, *table_ = nullptr;
  size_t table_stride_ = 0;
  HWY_ALIGN float diagonal_[kMaxDim];
  HWY_ALIGN float reduced_[kMaxDim * kWidth];
  HWY_ALIGN float memory_[2][kMaxDim * kMaxDim];
};

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
