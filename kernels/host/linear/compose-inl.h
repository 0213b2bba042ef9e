// SPDX-License-Identifier: Apache-2.0
// One head's transition of a cached interior, in whatever form it is stored, acting on panels of X. Matrices are
// multiplied on the matrix unit where there is one.
//
// Panels may be stored as rows of kTileBlock value columns each, [columns][PanelRowStride(d_k)], like a v-first state
// in memory. Only matrices on the matrix unit and zero act on those. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_COMPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_COMPOSE_INL_H_
#undef ASHLAR_KERNELS_HOST_COMPOSE_INL_H_
#else
#define ASHLAR_KERNELS_HOST_COMPOSE_INL_H_
#endif

#include <algorithm>
#include <cstddef>

#include "kernels/host/linear/chunk-inl.h"
#include "kernels/host/linear/decay-inl.h"
#include "kernels/host/simd/ahead.h"
#include "kernels/host/simd/matrix-inl.h"
#include "kernels/host/simd/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// Returns the size of a head's transition in memory, in bytes.
inline size_t TransitionBytes(const LinearShape& shape, const TupleView& tuple, size_t head) {
  const auto d_k = static_cast<size_t>(shape.d_k), element = ElementBytes(tuple.transition_dtype);
  const HeadTuple& stored = tuple.heads[head];
  switch (stored.form) {
    case TransitionForm::kDense:
      return d_k * d_k * element;
    case TransitionForm::kLowRank:
      return d_k * sizeof(float) + 2 * static_cast<size_t>(stored.rank) * d_k * element;
    default:
      return 0;  // a few cache lines at most: no prefetch
  }
}

// The distance between rows of a panel that is stored as rows.
constexpr size_t PanelRowStride(size_t d_k) {
  return RoundUp(d_k, kTileBlock);
}

// Reads `columns` value columns, which are also rows in memory, into a panel of rows.
template <class E>
HWY_INLINE void LoadRows(const typename E::Stored* HWY_RESTRICT from, size_t d_k, size_t columns, float scale,
                         float* HWY_RESTRICT panel) {
  const size_t stride = PanelRowStride(d_k);
  for (size_t j = 0; j < columns; ++j, panel += stride) {
    Widen<E>(from + j * d_k, d_k, scale, panel);
    std::fill(panel + d_k, panel + stride, 0.0f);
  }
  std::fill(panel, panel + (kWidth - columns) * stride, 0.0f);
}

class HeadTransition {
 public:
  // From now on panels are stored as rows, or as columns.
  void SetPanels(bool as_rows) { panels_are_rows_ = as_rows; }

  // Reads head `head` of a tuple, whose memory must not change afterwards.
  void Fill(const LinearShape& shape, const TupleView& tuple, size_t head) {
    const HeadTuple& stored = tuple.heads[head];
    form_ = stored.form;
    tile_parts_ = 0;
    d_k_ = static_cast<size_t>(shape.d_k);
    key_first_ = shape.order == StateOrder::kKeyFirst;
    const auto* floats = static_cast<const float*>(stored.transition);
    switch (form_) {
      case TransitionForm::kDense:
        WithElements(tuple.transition_dtype, [&](auto e) HWY_ATTR {
          using E = decltype(e);
          FillDense<E>(Elements<E>(stored.transition));
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

  // Head `head` of `tuple` comes next, after this transition was applied to `panels` panels: it is prefetched
  // meanwhile. Null: nothing is.
  void Expect(const LinearShape& shape, const TupleView* tuple, size_t head, size_t panels) {
    ahead_ = {};
    if (tuple == nullptr) return;
    const HeadTuple& stored = tuple->heads[head];
    const size_t parts = panels * Fetches();
    ahead_.state = Ahead(stored.state, d_k_ * static_cast<size_t>(shape.d_v) * ElementBytes(tuple->state_dtype), parts);
    ahead_.transition = Ahead(stored.transition, TransitionBytes(shape, *tuple, head), parts);
  }

  // Returns whether next ← S + T x for whole panels can read S from the object itself (fp32, in panels' order), without
  // a copy.
  bool AddsInPlace() const { return tile_parts_ > 0 && d_k_ % kTileBlock == 0; }
  // next ← S + T x with S read in place. Rows of S are `stride` numbers apart.
  void ApplyInPlace(const float* x, const float* state, size_t stride, float* next) {
    MultiplyTiles(x, state, stride, next);
  }

  // next ← next + T x for a panel of X's columns [begin, begin + count).
  void Apply(size_t begin, size_t count, const float* x, float* next) {
    const size_t vecs = (count + kLanes - 1) / kLanes;
    if (vecs == 1) {
      ApplyVecs<1>(begin, count, x, next);
    } else if (vecs == 2) {
      ApplyVecs<2>(begin, count, x, next);
    } else {
      ApplyVecs<kVecs>(begin, count, x, next);
    }
  }

 private:
  template <class E>
  void FillDense(const typename E::Stored* transition) {
    if (!SuitsTiles(d_k_)) {
      left_ = Operand::Of<E>(transition, d_k_, d_k_, memory_[0]);
      return;
    }
    if constexpr (kPanelsAreTiles) {
      tile_parts_ = kTileParts<E>;
      const MatrixCorner<E> matrix{transition, d_k_, d_k_, d_k_};
      if (panels_are_rows_) {
        SplitOperand<TileSide::kRight>(matrix, d_k_, d_k_, transition_tiles_);
      } else if (key_first_) {
        SplitOperand<TileSide::kLeft>(matrix, d_k_, d_k_, transition_tiles_);
      } else {
        SplitOperand<TileSide::kLeftTransposed>(matrix, d_k_, d_k_, transition_tiles_);
      }
    }
  }

  // Returns how often Apply fetches.
  size_t Fetches() const {
    if (tile_parts_ > 0) return TileBlocks(d_k_) * TileSteps(d_k_) * TileProducts(tile_parts_);
    const size_t blocks = RoundUp(d_k_, kRows) / kRows;
    return form_ == TransitionForm::kDense ? blocks * (RoundUp(d_k_, kFetchDepth) / kFetchDepth) : blocks;
  }

  // A left operand of a product, fp32. Products read whole blocks of rows.
  struct Operand {
    const float* at = nullptr;
    size_t stride = 0;

    // In place if possible, otherwise a copy in `memory`.
    template <class E>
    static Operand Of(const typename E::Stored* from, size_t rows, size_t columns, float* memory) {
      if constexpr (E::kIsF32) {
        if (rows % kRows == 0 && columns % kRows == 0) return {from, columns};
      }
      const size_t padded = RoundUp(columns, kRows), all = RoundUp(rows, kRows);
      for (size_t i = 0; i < all; ++i) {
        float* row = memory + i * padded;
        if (i < rows) Widen<E>(from + i * columns, columns, 1, row);
        std::fill(i < rows ? row + columns : row, row + padded, 0.0f);
      }
      return {memory, padded};
    }
  };

  template <size_t N>
  void ApplyVecs(size_t begin, size_t count, const float* x, float* next) {
    switch (form_) {
      case TransitionForm::kDense:
        if (tile_parts_ > 0) return MultiplyTiles(x, next, PanelStride(), next);
        return key_first_ ? Multiply<Left::kRowMajor, N>(x, next) : Multiply<Left::kColumnMajor, N>(x, next);
      case TransitionForm::kLowRank:
        Reduce<N>(x);
        return ScaleRows<N>(rank_, x, next);
      case TransitionForm::kScalar:
      case TransitionForm::kDiagonal:
        return ScaleRows<N>(0, x, next);
      case TransitionForm::kElementwise:
        return ScaleElements(begin, count, x, next);
      case TransitionForm::kZero:
        for (size_t i = 0; i < d_k_; i += kRows) ahead_.Fetch();
        return;
    }
  }

  // next ← next + T x, T a matrix.
  template <Left kLeft, size_t N>
  HWY_NOINLINE void Multiply(const float* x, float* next) {
    constexpr size_t kStep = kFetchDepth / 2;
    const size_t stride = left_.stride, step = kLeft == Left::kRowMajor ? 1 : stride;
    AheadTuple fetches = ahead_;  // local copy, so that the compiler keeps it in registers
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
    ahead_ = fetches;
  }

  size_t PanelStride() const { return panels_are_rows_ ? PanelRowStride(d_k_) : kWidth; }

  // The same on the matrix unit, of any addend.
  void MultiplyTiles(const float* x, const float* addend, size_t addend_stride, float* next) {
    if constexpr (kPanelsAreTiles) {
      if (panels_are_rows_) {
        SplitOperand<TileSide::kLeft>(MatrixCorner<F32>{x, PanelStride(), kWidth, d_k_}, kWidth, d_k_, panel_tiles_);
      } else {
        SplitOperand<TileSide::kRight>(MatrixCorner<F32>{x, PanelStride(), d_k_, kWidth}, kWidth, d_k_, panel_tiles_);
      }
      AddTileProduct({.transition = transition_tiles_,
                      .parts = tile_parts_,
                      .transition_left = !panels_are_rows_,
                      .blocks = TileBlocks(d_k_),
                      .steps = TileSteps(d_k_),
                      .panel = panel_tiles_,
                      .addend = addend,
                      .addend_stride = addend_stride,
                      .sum = next,
                      .sum_stride = PanelStride()},
                     ahead_);
    }
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
  HWY_NOINLINE void ScaleRows(size_t rank, const float* x, float* next) {
    for (size_t i = 0; i < d_k_; i += kRows) {
      ahead_.Fetch();
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
  HWY_NOINLINE void ScaleElements(size_t begin, size_t count, const float* x, float* next) {
    float *table = reduced_, *logs = diagonal_;
    LoadPanel<F32>(table_ + begin, table_stride_, d_k_, count, 1, table);
    std::fill(std::copy_n(logs_ + begin, count, logs), logs + kWidth, 0.0f);
    for (size_t i = 0; i < d_k_; ++i) {
      if (i % kRows == 0) ahead_.Fetch();
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
  AheadTuple ahead_;
  bool panels_are_rows_ = false;
  size_t tile_parts_ = 0;  // parts of a dense T on the matrix unit; 0: vectors are used
  HWY_ALIGN uint16_t transition_tiles_[TileBlocks(kMaxDim) * TileSteps(kMaxDim) * TileStepNumbers(kMaxTileParts)];
  HWY_ALIGN uint16_t panel_tiles_[TileSteps(kMaxDim) * TileStepNumbers(kMaxTileParts)];
};

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
