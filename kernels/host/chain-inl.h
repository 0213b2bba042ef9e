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

#include "hwy/cache_control.h"
#include "kernels/host/chain.h"
#include "kernels/host/chunk-inl.h"
#include "kernels/host/step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ashlar::kernels::host {
namespace HWY_NAMESPACE {

// Value heads that one worker advances together because they read the same keys: their products are made once.
constexpr size_t kTogether = 4;
constexpr size_t kMaxPanels = 2 * ((kMaxHeadDim + kWidth - 1) / kWidth);  // of [S | T]
constexpr size_t kPanelFloats = kMaxDim * kWidth;

struct Scratch {
  KeyChunk keys;
  HeadChunk head;
  HWY_ALIGN float y[kChunk * kWidth];
  HWY_ALIGN float out[kChunk * kWidth];
  HWY_ALIGN float transition[kMaxDim * kMaxDim];
  HWY_ALIGN float panels[kTogether * kMaxPanels + 1][kPanelFloats];
};

// Some columns of S or of T.
struct Columns {
  bool transition;
  size_t begin, count;
  size_t vecs() const { return (count + kLanes - 1) / kLanes; }
};

// How a chain is cut: value heads of one key head in slices, and the panels of X in blocks.
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
  return PanelsOf(chain.shape.d_v) + (chain.transition == nullptr ? 0 : PanelsOf(chain.shape.d_k));
}

// The coarsest cut that keeps the workers busy: every cut makes products of keys again that could be shared.
inline Split SplitFor(const Chain& chain, size_t workers) {
  const size_t group = static_cast<size_t>(chain.shape.heads / chain.shape.key_heads);
  const auto balanced = [&](const Split& split) {
    const size_t items = split.Items(chain), rounds = (items + workers - 1) / workers;
    return rounds * workers * 4 <= items * 5;  // at least four fifths of the workers' time is used
  };
  Split split{};
  for (size_t together = std::min(group, kTogether); together > 0; together /= 2) {
    split = {together, (group + together - 1) / together, 1};
    if (balanced(split)) return split;
  }
  for (size_t blocks = 2; blocks <= PanelsOf(chain); blocks *= 2) {
    split.blocks = blocks;
    if (balanced(split)) break;
  }
  return split;
}

// A matrix that will be composed next, on its way from memory while the present one is multiplied: a part with every
// block of rows.
struct Ahead {
  const float* from = nullptr;
  size_t left = 0, part = 0;  // floats

  HWY_INLINE void Fetch() {
    constexpr size_t kLine = 16;
    const size_t floats = std::min(part, left);
    for (size_t i = 0; i < floats; i += kLine) hwy::Prefetch(from + i);
    from += floats;
    left -= floats;
  }
};
struct AheadTuple {
  Ahead transition, state;
};

// One item of the cut.
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
      } else {
        Advance(step.begin, step.end);
      }
      if (step.checkpoint != nullptr) Store(step.checkpoint->heads, nullptr);
    }
    Store(chain_.state, chain_.transition);
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

  // Reads columns of a matrix of the caller's, in the shape's order.
  void Load(const float* from, const Columns& columns, float* panel) const {
    const size_t all = static_cast<size_t>(columns.transition ? shape_.d_k : shape_.d_v);
    if (key_first()) return LoadPanel(from + columns.begin, all, d_k_, columns.count, panel);
    LoadPanelTransposed(from + columns.begin * d_k_, d_k_, d_k_, columns.count, panel);
  }

  void Start(size_t h, size_t p) {
    const Columns columns = ColumnsOf(p);
    float* x = X(h, p);
    if (chain_.resume) return Load(static_cast<const float*>(chain_.state[first_head_ + h]), columns, x);
    std::fill(x, x + RoundUp(d_k_, kRows) * kWidth, 0.0f);
    if (!columns.transition) return;
    for (size_t j = 0; j < columns.count; ++j) x[(columns.begin + j) * kWidth + j] = 1;
  }

  // Writes S, and where it is wanted T.
  void Store(void* const* state, void* const* transition) {
    for (size_t h = 0; h < heads_; ++h) {
      for (size_t p = 0; p < panels_; ++p) {
        const Columns columns = ColumnsOf(p);
        void* const* matrices = columns.transition ? transition : state;
        if (matrices == nullptr) continue;
        auto* to = static_cast<float*>(matrices[first_head_ + h]);
        const size_t all = static_cast<size_t>(columns.transition ? shape_.d_k : shape_.d_v);
        if (key_first()) {
          StorePanel(X(h, p), d_k_, columns.count, to + columns.begin, all);
        } else {
          StorePanelTransposed(X(h, p), d_k_, columns.count, to + columns.begin * d_k_, d_k_);
        }
      }
    }
  }

  // S ← T_C S + S_C and T ← T_C T. `following`: the interior that comes next, or null.
  void Compose(const TupleView& interior, const TupleView* following) {
    for (size_t h = 0; h < heads_; ++h) {
      const bool last = h + 1 == heads_;
      AheadTuple ahead = AheadOf(last ? following : &interior, last ? first_head_ : first_head_ + h + 1);
      size_t stride = d_k_;
      const float* transition = Padded(static_cast<const float*>(interior.heads[first_head_ + h].transition), stride);
      for (size_t p = 0; p < panels_; ++p) {
        const Columns columns = ColumnsOf(p);
        float* next = Spare();
        if (columns.transition) {
          std::fill(next, next + RoundUp(d_k_, kRows) * kWidth, 0.0f);
        } else {
          Load(static_cast<const float*>(interior.heads[first_head_ + h].state), columns, next);
        }
        if (key_first()) {
          ComposePanel<Left::kRowMajor>(transition, stride, columns.vecs(), X(h, p), next, ahead);
        } else {
          ComposePanel<Left::kColumnMajor>(transition, stride, columns.vecs(), X(h, p), next, ahead);
        }
        std::swap(X(h, p), Spare());
      }
    }
  }

  AheadTuple AheadOf(const TupleView* interior, size_t head) const {
    if (interior == nullptr) return {};
    const size_t blocks = panels_ * (RoundUp(d_k_, kRows) / kRows);
    const size_t transition = d_k_ * d_k_, state = d_k_ * static_cast<size_t>(shape_.d_v);
    return {{static_cast<const float*>(interior->heads[head].transition), transition, transition / blocks + 1},
            {static_cast<const float*>(interior->heads[head].state), state, state / blocks + 1}};
  }

  // Where d_k is no multiple of kRows, a product would read past the transition's end: then it is copied first.
  const float* Padded(const float* transition, size_t& stride) {
    if (d_k_ % kRows == 0) return transition;
    stride = RoundUp(d_k_, kRows);
    for (size_t i = 0; i < stride; ++i) {
      float* row = scratch_.transition + i * stride;
      float* end = i < d_k_ ? std::copy_n(transition + i * d_k_, d_k_, row) : row;
      std::fill(end, row + stride, 0.0f);
    }
    return scratch_.transition;
  }

  template <Left kLeft>
  void ComposePanel(const float* a, size_t lda, size_t vecs, const float* x, float* next, AheadTuple& ahead) const {
    if (vecs == 1) return ComposeVecs<kLeft, 1>(a, lda, x, next, ahead);
    if (vecs == 2) return ComposeVecs<kLeft, 2>(a, lda, x, next, ahead);
    ComposeVecs<kLeft, kVecs>(a, lda, x, next, ahead);
  }

  template <Left kLeft, size_t N>
  HWY_NOINLINE void ComposeVecs(const float* a, size_t lda, const float* x, float* next, AheadTuple& ahead) const {
    for (size_t i = 0; i < d_k_; i += kRows) {
      ahead.transition.Fetch();
      ahead.state.Fetch();
      Block<N> c;
      c.Load(next + i * kWidth);
      Accumulate<kLeft>(c, kLeft == Left::kRowMajor ? a + i * lda : a + i, lda, x, d_k_);
      c.Store(next + i * kWidth);
    }
  }

  void Advance(int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t += kChunk) {
      const size_t tokens = static_cast<size_t>(std::min<int64_t>(kChunk, end - t));
      scratch_.keys.Fill(chain_.inputs, shape_, t, tokens, key_head_, chain_.out != nullptr);
      for (size_t h = 0; h < heads_; ++h) {
        scratch_.head.Fill(scratch_.keys, chain_.inputs, t, static_cast<int32_t>(first_head_ + h));
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
    const size_t column = (first_head_ + h) * static_cast<size_t>(shape_.d_v) + columns.begin;
    float *x = X(h, p), *y = scratch_.y;
    if (columns.transition) {
      std::fill(y, y + scratch_.keys.padded * kWidth, 0.0f);
    } else {
      const TokenInputs& inputs = chain_.inputs;
      LoadPanel(inputs.v + t * inputs.v_stride + column, static_cast<size_t>(inputs.v_stride), tokens, columns.count,
                y);
    }
    scratch_.head.template Correct<N>(x, y);
    if (chain_.out != nullptr && !columns.transition) {
      scratch_.head.template Output<N>(x, y, scratch_.out);
      StorePanel(scratch_.out, tokens, columns.count, chain_.out + t * chain_.out_stride + column,
                 static_cast<size_t>(chain_.out_stride));
    }
    scratch_.head.template Update<N>(y, x);
  }

  const Chain& chain_;
  const LinearShape& shape_;
  const size_t d_k_;
  Scratch& scratch_;
  int32_t key_head_;
  size_t first_head_, heads_, first_panel_, panels_;
  float* x_[kTogether * kMaxPanels + 1];  // the panels of X, and a spare one that composition writes into
};

// Below this many floats of state in all heads, waking a worker takes longer than a token.
constexpr int64_t kFloatsWorthWaking = 1 << 17;

template <typename Fn>
void ForEach(int64_t count, Workers* workers, const Fn& fn) {
  if (workers != nullptr) return ParallelFor(*workers, count, fn);
  for (int64_t i = 0; i < count; ++i) fn(i);
}

inline void RunChain(const Chain& chain, Workers* workers) {
  if (IsFewTokens(chain)) {
    const int64_t floats = int64_t{chain.shape.heads} * chain.shape.d_k * chain.shape.d_v;
    return ForEach(chain.shape.heads, floats < kFloatsWorthWaking ? nullptr : workers,
                   [&](int64_t head) { StepHead(chain, head); });
  }
  const Split split = SplitFor(chain, workers == nullptr ? 1 : static_cast<size_t>(workers->Size()));
  ForEach(static_cast<int64_t>(split.Items(chain)), workers, [&](int64_t item) {
    static thread_local const std::unique_ptr<Scratch> scratch(new Scratch);
    Strand(chain, split, static_cast<size_t>(item), *scratch).Run();
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace ashlar::kernels::host
HWY_AFTER_NAMESPACE();

#endif
