// The recurrence and its composition in plain loops, fp64 throughout (HYPIC equations 2, 4 and 6).
#include <cmath>
#include <vector>

#include "kernels/reference/reference.h"

namespace ashlar::kernels::reference {
namespace {

// One head's running matrix, [d_k, columns], fp64: a state (columns = d_v) or a transition (columns = d_k).
class Head {
 public:
  Head(const LinearShape& shape, int32_t columns)
      : shape_(shape), columns_(columns), s_(static_cast<size_t>(shape.d_k) * columns) {}

  void SetIdentity() {
    for (int32_t i = 0; i < shape_.d_k; ++i) At(i, i) = 1;
  }

  void Read(const float* from) {
    for (int32_t i = 0; i < shape_.d_k; ++i) {
      for (int32_t j = 0; j < columns_; ++j) At(i, j) = from[Index(i, j)];
    }
  }

  void Write(float* to) {
    for (int32_t i = 0; i < shape_.d_k; ++i) {
      for (int32_t j = 0; j < columns_; ++j) to[Index(i, j)] = static_cast<float>(At(i, j));
    }
  }

  // S ← e^g (I − β k kᵀ) S + β k vᵀ; a null v stands for zero.
  void Advance(const float* k, const float* v, double g, double beta) {
    const double decay = std::exp(g);
    for (int32_t j = 0; j < columns_; ++j) {
      double read = 0;
      for (int32_t i = 0; i < shape_.d_k; ++i) read += k[i] * decay * At(i, j);
      const double write = beta * ((v == nullptr ? 0.0 : v[j]) - read);
      for (int32_t i = 0; i < shape_.d_k; ++i) At(i, j) = decay * At(i, j) + k[i] * write;
    }
  }

  // S ← T S + S_C; a null end state stands for zero.
  void Compose(const float* transition, const float* state) {
    const bool key_first = shape_.order == StateOrder::kKeyFirst;
    std::vector<double> out(s_.size());
    for (int32_t i = 0; i < shape_.d_k; ++i) {
      double* row = out.data() + static_cast<size_t>(i) * columns_;
      for (int32_t j = 0; j < columns_; ++j) row[j] = state == nullptr ? 0.0 : state[Index(i, j)];
      for (int32_t m = 0; m < shape_.d_k; ++m) {
        const double t = transition[key_first ? i * shape_.d_k + m : m * shape_.d_k + i];
        for (int32_t j = 0; j < columns_; ++j) row[j] += t * At(m, j);
      }
    }
    s_ = std::move(out);
  }

  void Output(const float* q, float* out) {
    for (int32_t j = 0; j < columns_; ++j) {
      double sum = 0;
      for (int32_t i = 0; i < shape_.d_k; ++i) sum += q[i] * At(i, j);
      out[j] = static_cast<float>(sum);
    }
  }

 private:
  double& At(int32_t row, int32_t column) { return s_[static_cast<size_t>(row) * columns_ + column]; }
  size_t Index(int32_t row, int32_t column) const {
    return shape_.order == StateOrder::kKeyFirst ? static_cast<size_t>(row) * columns_ + column
                                                 : static_cast<size_t>(column) * shape_.d_k + row;
  }

  const LinearShape shape_;
  const int32_t columns_;
  std::vector<double> s_;
};

struct Token {
  const float *q, *k, *v;
  double g, beta;
};

Token TokenOf(const LinearShape& shape, const TokenInputs& in, int64_t t, int32_t head) {
  const int64_t key_head = head / (shape.heads / shape.key_heads);
  return {.q = in.q == nullptr ? nullptr : in.q + t * in.q_stride + key_head * shape.d_k,
          .k = in.k + t * in.k_stride + key_head * shape.d_k,
          .v = in.v + t * in.v_stride + int64_t{head} * shape.d_v,
          .g = in.g[t * in.g_stride + head],
          .beta = in.beta[t * in.beta_stride + head]};
}

}  // namespace

void Compose(const ComposeArgs& args) {
  for (int32_t h = 0; h < args.shape.heads; ++h) {
    Head state(args.shape, args.shape.d_v);
    state.Read(args.state[h]);
    for (const TupleView& interior : args.interiors) state.Compose(interior.transition[h], interior.state[h]);
    state.Write(args.state[h]);
  }
}

void ComposeTransitions(const ComposeTransitionsArgs& args) {
  for (int32_t h = 0; h < args.shape.heads; ++h) {
    Head transition(args.shape, args.shape.d_k), state(args.shape, args.shape.d_v);
    transition.SetIdentity();
    for (const TupleView& interior : args.interiors) {
      transition.Compose(interior.transition[h], nullptr);
      state.Compose(interior.transition[h], interior.state[h]);
    }
    transition.Write(args.transition[h]);
    state.Write(args.state[h]);
  }
}

void Capture(const CaptureArgs& args) {
  for (int32_t h = 0; h < args.shape.heads; ++h) {
    Head transition(args.shape, args.shape.d_k), state(args.shape, args.shape.d_v);
    transition.SetIdentity();
    for (int64_t t = 0; t < args.inputs.tokens; ++t) {
      const Token token = TokenOf(args.shape, args.inputs, t, h);
      if (args.transition != nullptr) transition.Advance(token.k, nullptr, token.g, token.beta);
      state.Advance(token.k, token.v, token.g, token.beta);
    }
    if (args.transition != nullptr) transition.Write(args.transition[h]);
    state.Write(args.state[h]);
  }
}

void AdvanceSeam(const AdvanceSeamArgs& args) {
  for (int32_t h = 0; h < args.shape.heads; ++h) {
    Head state(args.shape, args.shape.d_v);
    state.Read(args.state[h]);
    for (const SeamStep& step : args.steps) {
      if (step.interior != nullptr) {
        state.Compose(step.interior->transition[h], step.interior->state[h]);
      } else {
        for (int64_t t = step.begin; t < step.end; ++t) {
          const Token token = TokenOf(args.shape, args.inputs, t, h);
          state.Advance(token.k, token.v, token.g, token.beta);
          if (args.out != nullptr) state.Output(token.q, args.out + t * args.out_stride + int64_t{h} * args.shape.d_v);
        }
      }
      if (step.checkpoint != nullptr) state.Write(step.checkpoint[h]);
    }
    state.Write(args.state[h]);
  }
}

}  // namespace ashlar::kernels::reference
