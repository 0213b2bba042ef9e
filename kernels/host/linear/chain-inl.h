// SPDX-License-Identifier: Apache-2.0
// A chain, head by head and panel by panel. Included once for every target of Highway.

#if defined(ASHLAR_KERNELS_HOST_CHAIN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ASHLAR_KERNELS_HOST_CHAIN_INL_H_
#undef ASHLAR_KERNELS_HOST_CHAIN_INL_H_
#else
#define ASHLAR_KERNELS_HOST_CHAIN_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "kernels/host/linear/chain.h"
#include "kernels/host/linear/chunk-inl.h"
#include "kernels/host/linear/compose-inl.h"
#include "kernels/host/linear/elementwise-inl.h"
#include "kernels/host/linear/step-inl.h"
#include "kernels/host/linear/stream-inl.h"
#include "kernels/host/linear/turn-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// The number of value heads that one worker advances together: they read the same keys, so products of keys are
// computed once.
constexpr size_t kTogether = 4;
constexpr size_t kMaxPanels = 2 * ((kMaxHeadDim + kWidth - 1) / kWidth);  // panels of [S | T]

struct Scratch {
  KeyChunk keys;
  HeadChunk head;
  HeadTransition transition;
  Turn turn;
  HWY_ALIGN float y[kChunk * kWidth];
  HWY_ALIGN float out[kChunk * kWidth];
  HWY_ALIGN float panels[kTogether * kMaxPanels + 1][kPanelStride];
};

// Some columns of S or of T.
struct Columns {
  bool transition;
  size_t begin, count;
  size_t vecs() const { return (count + kLanes - 1) / kLanes; }
};

// The division of a chain: value heads of one key head in slices, and the panels of X in blocks.
struct Split {
  size_t together;  // heads in a slice
  size_t slices;    // a key head
  size_t blocks;
  size_t Items(const Chain& chain) const { return static_cast<size_t>(chain.shape.key_heads) * slices * blocks; }
};

inline size_t PanelsOf(int32_t columns) {
  return (static_cast<size_t>(columns) + kWidth - 1) / kWidth;
}
inline size_t PanelsOf(const Chain& chain) {
  return PanelsOf(chain.shape.d_v) + (chain.has_transition_columns() ? PanelsOf(chain.shape.d_k) : 0);
}

// Returns whether the chain writes a state whose exponent depends on all of its numbers.
inline bool WritesExponents(const Chain& chain) {
  const auto writes = [](const SeamStep& step) {
    return step.checkpoint != nullptr && step.checkpoint->dtype == DType::kF16;
  };
  return chain.state.dtype == DType::kF16 || std::any_of(chain.steps.begin(), chain.steps.end(), writes);
}

// The coarsest division that keeps the workers busy: every cut repeats products of keys that could be shared.
inline Split SplitFor(const Chain& chain, size_t workers) {
  const size_t group = static_cast<size_t>(chain.shape.heads / chain.shape.key_heads);
  const auto balanced = [&](const Split& split) {
    const size_t items = split.Items(chain), rounds = (items + workers - 1) / workers;
    return rounds * workers * 4 <= items * 5;  // true: at least 4/5 of the workers' time is used
  };
  Split split{};
  for (size_t together = std::min(group, kTogether); together > 0; together /= 2) {
    split = {together, (group + together - 1) / together, 1};
    if (balanced(split)) return split;
  }
  if (WritesExponents(chain)) return split;
  for (size_t blocks = 2; blocks <= PanelsOf(chain); blocks *= 2) {
    split.blocks = blocks;
    if (balanced(split)) break;
  }
  return split;
}

// One item of the division.
class Strand {
 public:
  Strand(const Chain& chain, const Split& split, size_t item, Scratch& scratch)
      : chain_(chain), shape_(chain.shape), d_k_(static_cast<size_t>(shape_.d_k)), scratch_(scratch) {
    const size_t group = static_cast<size_t>(shape_.heads / shape_.key_heads);
    const size_t block = item % split.blocks, slice = item / split.blocks % split.slices;
    const size_t key_head = item / split.blocks / split.slices;
    key_head_ = static_cast<int32_t>(key_head);
    first_head_ = key_head * group + slice * split.together;
    heads_ = std::min(split.together, group - slice * split.together);
    const size_t panels = PanelsOf(chain);
    first_panel_ = panels * block / split.blocks;
    panels_ = panels * (block + 1) / split.blocks - first_panel_;
    for (size_t i = 0; i <= heads_ * panels_; ++i) x_[i] = scratch_.panels[i];
    rows_ = PanelsMayBeRows();
    scratch_.transition.SetPanels(rows_);
  }

  void Run() {
    for (size_t h = 0; h < heads_; ++h) {
      for (size_t p = 0; p < panels_; ++p) Start(h, p);
    }
    for (size_t i = 0; i < chain_.interiors.size(); ++i) {
      Compose(chain_.interiors[i], i + 1 < chain_.interiors.size() ? &chain_.interiors[i + 1] : nullptr);
    }
    for (const SeamStep& step : chain_.steps) {
      if (step.interior != nullptr) {
        const bool last = &step == &chain_.steps.back();
        Compose(*step.interior, last ? nullptr : (&step + 1)->interior);
      } else if (chain_.form() == TransitionForm::kElementwise) {
        AdvanceElementwise(step.begin, step.end);
      } else {
        Advance(step.begin, step.end);
      }
      if (step.checkpoint != nullptr) StoreStates(*step.checkpoint);
    }
    StoreStates(chain_.state);
    StoreTransitions();
  }

 private:
  Columns ColumnsOf(size_t p) const {
    const size_t panel = first_panel_ + p, state_panels = PanelsOf(shape_.d_v);
    const bool transition = panel >= state_panels;
    const size_t begin = (transition ? panel - state_panels : panel) * kWidth;
    const size_t all = static_cast<size_t>(transition ? shape_.d_k : shape_.d_v);
    return {transition, begin, std::min(kWidth, all - begin)};
  }
  float*& X(size_t h, size_t p) { return x_[h * panels_ + p]; }
  float*& Spare() { return x_[heads_ * panels_]; }
  bool key_first() const { return shape_.order == StateOrder::kKeyFirst; }

  // Panels of v-first states need not be transposed if only composition on the matrix unit acts on them.
  bool PanelsMayBeRows() const {
    if (key_first() || !chain_.steps.empty() || chain_.form() != TransitionForm::kDense || !SuitsTiles(d_k_))
      return false;
    for (const TupleView& interior : chain_.interiors) {
      for (size_t head = first_head_; head < first_head_ + heads_; ++head) {
        const TransitionForm form = interior.heads[head].form;
        if (form != TransitionForm::kDense && form != TransitionForm::kZero) return false;
      }
    }
    return true;
  }

  // Reads columns of a state of the caller's, in the shape's order.
  void LoadState(DType dtype, const void* state, int32_t exponent, const Columns& columns, float* panel) const {
    const auto d_v = static_cast<size_t>(shape_.d_v);
    const float scale = exponent == 0 ? 1.0f : std::ldexp(1.0f, exponent);
    WithElements(dtype, [&](auto e) HWY_ATTR {
      using E = decltype(e);
      if (rows_) {
        LoadRows<E>(Elements<E>(state, columns.begin * d_k_), d_k_, columns.count, scale, panel);
      } else if (key_first()) {
        LoadPanel<E>(Elements<E>(state, columns.begin), d_v, d_k_, columns.count, scale, panel);
      } else {
        LoadPanelTransposed<E>(Elements<E>(state, columns.begin * d_k_), d_k_, d_k_, columns.count, scale, panel);
      }
    });
  }

  void SetZero(float* panel) const {
    std::fill(panel, panel + (rows_ ? kWidth * PanelRowStride(d_k_) : RoundUp(d_k_, kRows) * kWidth), 0.0f);
  }

  void Start(size_t h, size_t p) {
    const Columns columns = ColumnsOf(p);
    float* x = X(h, p);
    const size_t head = first_head_ + h;
    const StateView& state = chain_.state;
    if (chain_.resume) {
      return LoadState(state.dtype, state.heads[head], state.exponents == nullptr ? 0 : state.exponents[head], columns,
                       x);
    }
    SetZero(x);
    if (!columns.transition) return;
    for (size_t j = 0; j < columns.count; ++j) {
      const size_t i = columns.begin + j;
      x[rows_ ? j * PanelRowStride(d_k_) + i : i * kWidth + j] = 1;
    }
  }

  // Writes columns of S or T.
  void Store(const float* panel, const Columns& columns, DType dtype, int exponent, void* to) const {
    const auto all = static_cast<size_t>(columns.transition ? shape_.d_k : shape_.d_v);
    const float scale = exponent == 0 ? 1.0f : std::ldexp(1.0f, -exponent);
    WithElements(dtype, [&](auto e) HWY_ATTR {
      using E = decltype(e);
      if (rows_) {
        for (size_t j = 0; j < columns.count; ++j) {
          Narrow<E>(panel + j * PanelRowStride(d_k_), d_k_, scale, Elements<E>(to, (columns.begin + j) * d_k_));
        }
      } else if (key_first()) {
        StorePanel<E>(panel, d_k_, columns.count, scale, Elements<E>(to, columns.begin), all);
      } else {
        StorePanelTransposed<E>(panel, d_k_, columns.count, scale, Elements<E>(to, columns.begin * d_k_), d_k_);
      }
    });
  }

  void StoreStates(const StateView& to) {
    for (size_t h = 0; h < heads_; ++h) {
      const size_t head = first_head_ + h;
      const int exponent = to.dtype == DType::kF16 ? to.exponents[head] = Exponent(h) : 0;
      for (size_t p = 0; p < panels_; ++p) {
        const Columns columns = ColumnsOf(p);
        if (!columns.transition) Store(X(h, p), columns, to.dtype, exponent, to.heads[head]);
      }
    }
  }

  void StoreTransitions() {
    if (chain_.transition == nullptr) return;
    for (size_t h = 0; h < heads_; ++h) {
      void* const to = chain_.transition[first_head_ + h];
      if (!chain_.has_transition_columns()) {
        if (first_panel_ == 0) SumLogs(chain_, first_head_ + h, static_cast<float*>(to));
        continue;
      }
      for (size_t p = 0; p < panels_; ++p) {
        const Columns columns = ColumnsOf(p);
        if (columns.transition) Store(X(h, p), columns, chain_.transition_dtype, 0, to);
      }
    }
  }

  int Exponent(size_t h) {
    Vec largest = hn::Zero(Tag());
    for (size_t p = 0; p < panels_; ++p) {
      const Columns columns = ColumnsOf(p);
      if (columns.transition) continue;
      // Padding is zero, and so never the largest.
      if (rows_) {
        largest = LargestOf(X(h, p), kWidth * PanelRowStride(d_k_), largest);
      } else {
        for (size_t i = 0; i < d_k_; ++i) largest = LargestOf(X(h, p) + i * kWidth, columns.count, largest);
      }
    }
    return HalfExponent(hn::GetLane(hn::MaxOfLanes(Tag(), largest)));
  }

  // S ← T_C S + S_C and T ← T_C T. `following`: the next interior, or null.
  void Compose(const TupleView& interior, const TupleView* following) {
    scratch_.turn.Fill(shape_.rotation, interior.position);
    for (size_t h = 0; h < heads_; ++h) {
      const bool last = h + 1 == heads_;
      const size_t head = first_head_ + h;
      scratch_.transition.Fill(shape_, interior, head);
      scratch_.transition.Expect(shape_, last ? following : &interior, last ? first_head_ : head + 1, panels_);
      for (size_t p = 0; p < panels_; ++p) {
        ComposePanel(interior, head, ColumnsOf(p), X(h, p), Spare());
        std::swap(X(h, p), Spare());
      }
    }
  }

  void ComposePanel(const TupleView& interior, size_t head, const Columns& columns, const float* x, float* next) {
    const HeadTuple& stored = interior.heads[head];
    if (columns.transition) {
      SetZero(next);
    } else if (LiesAsAdded(interior, stored, columns)) {
      const auto stride = rows_ ? d_k_ : static_cast<size_t>(shape_.d_v);
      const float* state = static_cast<const float*>(stored.state) + columns.begin * (rows_ ? d_k_ : 1);
      return scratch_.transition.ApplyInPlace(x, state, stride, next);
    } else {
      LoadState(interior.state_dtype, stored.state, stored.state_exponent, columns, next);
      scratch_.turn.Apply(next);
    }
    scratch_.transition.Apply(columns.begin, columns.count, x, next);
  }
  // Returns whether S_C in memory already has the form that LoadState would give it.
  bool LiesAsAdded(const TupleView& interior, const HeadTuple& stored, const Columns& columns) const {
    return scratch_.transition.AddsInPlace() && (rows_ || key_first()) && interior.state_dtype == DType::kF32 &&
           stored.state_exponent == 0 && columns.count == kWidth && scratch_.turn.pairs == 0;
  }

  void Advance(int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t += kChunk) {
      const size_t tokens = static_cast<size_t>(std::min<int64_t>(kChunk, end - t));
      scratch_.keys.Fill(chain_.inputs, shape_, t, tokens, key_head_, chain_.out != nullptr);
      for (size_t h = 0; h < heads_; ++h) {
        scratch_.head.Fill(scratch_.keys, shape_, chain_.inputs, t, first_head_ + h);
        for (size_t p = 0; p < panels_; ++p) {
          const size_t vecs = ColumnsOf(p).vecs();
          if (vecs == 1) {
            AdvancePanel<1>(h, p, t);
          } else if (vecs == 2) {
            AdvancePanel<2>(h, p, t);
          } else {
            AdvancePanel<kVecs>(h, p, t);
          }
        }
      }
    }
  }

  template <size_t N>
  void AdvancePanel(size_t h, size_t p, int64_t t) {
    const Columns columns = ColumnsOf(p);
    const size_t tokens = scratch_.keys.tokens;
    float *x = X(h, p), *y = scratch_.y;
    if (columns.transition) {
      std::fill(y, y + scratch_.keys.padded * kWidth, 0.0f);
    } else {
      const TokenInputs& inputs = chain_.inputs;
      LoadPanel<F32>(inputs.v + t * inputs.v_stride + ValueColumn(h, columns), static_cast<size_t>(inputs.v_stride),
                     tokens, columns.count, 1, y);
    }
    scratch_.head.template Correct<N>(x, y);
    if (chain_.out != nullptr && !columns.transition) {
      scratch_.head.template Output<N>(x, y, scratch_.out);
      StorePanel<F32>(scratch_.out, tokens, columns.count, 1,
                      chain_.out + t * chain_.out_stride + ValueColumn(h, columns),
                      static_cast<size_t>(chain_.out_stride));
    }
    scratch_.head.template Update<N>(y, x);
  }

  // Returns the column at which a panel of S begins in a token's values and outputs.
  size_t ValueColumn(size_t h, const Columns& columns) const {
    return (first_head_ + h) * static_cast<size_t>(shape_.d_v) + columns.begin;
  }

  void AdvanceElementwise(int64_t begin, int64_t end) {
    // In chunks, so that a token's numbers are read together: tokens may be pages apart.
    for (int64_t t = begin; t < end; t += kChunk) {
      for (size_t h = 0; h < heads_; ++h) {
        for (size_t p = 0; p < panels_; ++p) AdvanceElements(h, p, t, std::min<int64_t>(t + kChunk, end));
      }
    }
  }

  void AdvanceElements(size_t h, size_t p, int64_t begin, int64_t end) {
    const TokenInputs& inputs = chain_.inputs;
    const auto d_v = static_cast<size_t>(shape_.d_v);
    const Columns columns = ColumnsOf(p);
    const size_t value = ValueColumn(h, columns);
    const int64_t key = int64_t{key_head_} * shape_.d_k;
    float* table = Spare();
    LoadPanel<F32>(shape_.decay_table + (first_head_ + h) * d_k_ * d_v + columns.begin, d_v, d_k_, columns.count, 1,
                   table);
    for (int64_t t = begin; t < end; ++t) {
      const ElementToken token{
          .q = chain_.out == nullptr ? nullptr : inputs.q + t * inputs.q_stride + key,
          .k = inputs.k + t * inputs.k_stride + key,
          .v = inputs.v + t * inputs.v_stride + value,
          .beta = inputs.beta + t * inputs.beta_stride + value,
          .out = chain_.out == nullptr ? nullptr : chain_.out + t * chain_.out_stride + value,
      };
      AdvanceElement(token, d_k_, columns.count, table, X(h, p));
    }
  }

  const Chain& chain_;
  const LinearShape& shape_;
  const size_t d_k_;
  Scratch& scratch_;
  int32_t key_head_;
  size_t first_head_, heads_, first_panel_, panels_;
  bool rows_;                             // panels are stored as rows (compose-inl.h)
  float* x_[kTogether * kMaxPanels + 1];  // panels of X, and a spare panel that composition writes to
};

// Below this many floats of state in all heads, waking a worker takes longer than a token.
constexpr int64_t kFloatsWorthWaking = 1 << 17;

inline void RunChain(const Chain& chain, Workers* workers) {
  if (IsFewTokens(chain)) {
    const int64_t floats = int64_t{chain.shape.heads} * chain.shape.d_k * chain.shape.d_v;
    return ParallelFor(floats < kFloatsWorthWaking ? nullptr : workers, chain.shape.heads,
                       [&](int64_t head) { StepHead(chain, static_cast<size_t>(head)); });
  }
  if (IsStream(chain)) {
    return ParallelFor(workers, chain.shape.heads, [&](int64_t head) {
      static thread_local const std::unique_ptr<StreamScratch> scratch(new StreamScratch);
      Stream(chain, static_cast<size_t>(head), *scratch).Run();
    });
  }
  const Split split = SplitFor(chain, workers == nullptr ? 1 : static_cast<size_t>(workers->Size()));
  ParallelFor(workers, static_cast<int64_t>(split.Items(chain)), [&](int64_t item) {
    static thread_local const std::unique_ptr<Scratch> scratch(new Scratch);
    Strand(chain, split, static_cast<size_t>(item), *scratch).Run();
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
