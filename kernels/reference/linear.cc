// The recurrence and its composition in plain loops, fp64 throughout (HYPIC equations 2, 4 and 6; all families).
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/reference/reference.h"

namespace ashlar::kernels::reference {
namespace {

// A matrix [rows, columns], fp64.
struct Matrix {
  Matrix(int32_t rows, int32_t columns) : rows(rows), columns(columns), values(static_cast<size_t>(rows) * columns) {}
  double& operator()(int32_t i, int32_t j) { return values[static_cast<size_t>(i) * columns + j]; }
  double operator()(int32_t i, int32_t j) const { return values[static_cast<size_t>(i) * columns + j]; }

  int32_t rows, columns;
  std::vector<double> values;
};

// A matrix of the caller's, k-first [rows, columns] or turned.
Matrix Read(StateOrder order, DType dtype, const void* from, int32_t rows, int32_t columns, int exponent = 0) {
  Matrix out(rows, columns);
  for (int32_t i = 0; i < rows; ++i) {
    for (int32_t j = 0; j < columns; ++j) {
      const int64_t index = order == StateOrder::kKeyFirst ? int64_t{i} * columns + j : int64_t{j} * rows + i;
      out(i, j) = std::ldexp(static_cast<double>(ReadElement(dtype, from, index)), exponent);
    }
  }
  return out;
}

void Write(const Matrix& matrix, StateOrder order, DType dtype, void* to, int exponent = 0) {
  for (int32_t i = 0; i < matrix.rows; ++i) {
    for (int32_t j = 0; j < matrix.columns; ++j) {
      const int64_t index =
          order == StateOrder::kKeyFirst ? int64_t{i} * matrix.columns + j : int64_t{j} * matrix.rows + i;
      WriteElement(dtype, to, index, static_cast<float>(std::ldexp(matrix(i, j), -exponent)));
    }
  }
}

// Writes a state, and for fp16 its exponent: the least e ≥ 0 with max|S| ≤ 2^(e + 15).
void WriteState(const Matrix& state, StateOrder order, DType dtype, void* to, int32_t* exponent) {
  int e = 0;
  if (dtype == DType::kF16) {
    double largest = 0;
    for (double value : state.values) largest = std::max(largest, std::fabs(value));
    while (std::isfinite(largest) && largest > std::ldexp(1.0, e + 15)) ++e;
    *exponent = e;
  }
  Write(state, order, dtype, to, e);
}

// A transition of any form: multiplied by element, by row, or as a matrix.
struct Transition {
  explicit Transition(const LinearShape& shape) : form(NaturalForm(shape.family)) {
    if (form == TransitionForm::kScalar) logs.assign(1, 0);
    if (form == TransitionForm::kDiagonal) logs.assign(shape.d_k, 0);
    if (form == TransitionForm::kElementwise) logs.assign(shape.d_v, 0);
    if (form != TransitionForm::kDense) return;
    dense = Matrix(shape.d_k, shape.d_k);
    for (int32_t i = 0; i < shape.d_k; ++i) dense(i, i) = 1;
  }

  TransitionForm form;
  std::vector<double> logs;  // elementwise: Σ dt
  Matrix dense{0, 0};        // low rank too, multiplied out
};

Transition ReadTransition(const LinearShape& shape, const TupleView& tuple, int32_t h) {
  const HeadTuple& head = tuple.heads[h];
  Transition out(shape);
  out.form = head.form;
  const auto* floats = static_cast<const float*>(head.transition);
  switch (head.form) {
    case TransitionForm::kZero:
      break;
    case TransitionForm::kScalar:
    case TransitionForm::kDiagonal:
    case TransitionForm::kElementwise:
      for (size_t i = 0; i < out.logs.size(); ++i) out.logs[i] = floats[i];
      break;
    case TransitionForm::kDense:
      out.dense = Read(shape.order, tuple.transition_dtype, head.transition, shape.d_k, shape.d_k);
      break;
    case TransitionForm::kLowRank: {
      const void* factors = floats + shape.d_k;
      const int64_t factor = int64_t{head.rank} * shape.d_k;
      for (int32_t i = 0; i < shape.d_k; ++i) {
        for (int32_t j = 0; j < shape.d_k; ++j) {
          double sum = i == j ? floats[i] : 0.0;
          for (int64_t r = 0; r < head.rank; ++r) {
            sum += double{ReadElement(tuple.transition_dtype, factors, r * shape.d_k + i)} *
                   ReadElement(tuple.transition_dtype, factors, factor + r * shape.d_k + j);
          }
          out.dense(i, j) = sum;
        }
      }
      break;
    }
  }
  return out;
}

// How head h's element (i, j) of a state decays under a transition that is no matrix.
double DecayOf(const LinearShape& shape, const Transition& t, int32_t h, int32_t i, int32_t j) {
  switch (t.form) {
    case TransitionForm::kScalar:
      return std::exp(t.logs[0]);
    case TransitionForm::kDiagonal:
      return std::exp(t.logs[i]);
    case TransitionForm::kElementwise:
      if (std::isinf(t.logs[j])) return 0;  // composed with a transition of zero; A may be zero itself
      return std::exp(shape.decay_table[(int64_t{h} * shape.d_k + i) * shape.d_v + j] * t.logs[j]);
    default:
      return 0;
  }
}

// T X, X a state or a dense transition.
Matrix Apply(const LinearShape& shape, const Transition& t, int32_t h, const Matrix& x) {
  const bool matrix = t.form == TransitionForm::kDense || t.form == TransitionForm::kLowRank;
  Matrix out(x.rows, x.columns);
  for (int32_t i = 0; i < x.rows; ++i) {
    for (int32_t j = 0; j < x.columns; ++j) {
      if (matrix) {
        for (int32_t m = 0; m < x.rows; ++m) out(i, j) += t.dense(i, m) * x(m, j);
      } else if (t.form != TransitionForm::kZero) {
        out(i, j) = DecayOf(shape, t, h, i, j) * x(i, j);
      }
    }
  }
  return out;
}

// R(position) on the key axis.
void Turn(const Rotation& rotation, int64_t position, Matrix& state) {
  const int32_t pairs = rotation.style == RopeStyle::kNone ? 0 : rotation.rotary_dim / 2;
  for (int32_t p = 0; p < pairs; ++p) {
    const bool half_split = rotation.style == RopeStyle::kHalfSplit;
    const int32_t a = half_split ? p : 2 * p, b = half_split ? p + pairs : 2 * p + 1;
    const double angle = static_cast<double>(position) * rotation.frequencies[p];
    for (int32_t j = 0; j < state.columns; ++j) {
      const double x = state(a, j), y = state(b, j);
      state(a, j) = x * std::cos(angle) - y * std::sin(angle);
      state(b, j) = x * std::sin(angle) + y * std::cos(angle);
    }
  }
}

// S ← T S + R(position) S_C.
void Compose(const LinearShape& shape, const TupleView& tuple, int32_t h, Matrix& state) {
  const HeadTuple& head = tuple.heads[h];
  Matrix end = Read(shape.order, tuple.state_dtype, head.state, shape.d_k, shape.d_v, head.state_exponent);
  Turn(shape.rotation, tuple.position, end);
  state = Apply(shape, ReadTransition(shape, tuple, h), h, state);
  for (size_t i = 0; i < state.values.size(); ++i) state.values[i] += end.values[i];
}

// One token as one head sees it.
struct Token {
  Token(const LinearShape& shape, const TokenInputs& in, int64_t t, int32_t h) {
    const int64_t key_head = h / (shape.heads / shape.key_heads);
    if (in.q != nullptr) q = in.q + t * in.q_stride + key_head * shape.d_k;
    k = in.k + t * in.k_stride + key_head * shape.d_k;
    v = in.v + t * in.v_stride + int64_t{h} * shape.d_v;
    if (in.g != nullptr) g = in.g + t * in.g_stride + int64_t{h} * GateWidth(shape);
    if (in.beta != nullptr) beta = in.beta + t * in.beta_stride + int64_t{h} * BetaWidth(shape);
  }
  const float *q = nullptr, *k, *v, *g = nullptr, *beta = nullptr;
};

// Log decay of element (i, j) by one token.
double LogDecay(const LinearShape& shape, const Token& token, int32_t h, int32_t i, int32_t j) {
  switch (shape.family) {
    case Family::kRetnet:
    case Family::kLightning:
      return shape.decay_table[h];
    case Family::kMamba2:
      return double{shape.decay_table[h]} * token.beta[0];
    case Family::kMamba1:
      return double{shape.decay_table[(int64_t{h} * shape.d_k + i) * shape.d_v + j]} * token.beta[j];
    case Family::kGla:
    case Family::kKda:
      return token.g[i];
    case Family::kGdn:
      return token.g[0];
    case Family::kDeltanet:
      return 0;
  }
  return 0;
}

// X ← T_t X + u_t for columns of a state; v null: u = 0, for columns of a transition.
void Advance(const LinearShape& shape, const Token& token, int32_t h, const float* v, Matrix& x) {
  for (int32_t j = 0; j < x.columns; ++j) {
    double read = 0;
    for (int32_t i = 0; i < x.rows; ++i) {
      x(i, j) *= std::exp(LogDecay(shape, token, h, i, j));
      read += double{token.k[i]} * x(i, j);
    }
    double write = v == nullptr ? 0.0 : v[j];
    if (Erases(shape.family)) write -= read;
    if (BetaWidth(shape) > 0) write *= token.beta[BetaWidth(shape) == 1 ? 0 : j];
    for (int32_t i = 0; i < x.rows; ++i) x(i, j) += token.k[i] * write;
  }
}

// T ← T_t T.
void Advance(const LinearShape& shape, const Token& token, int32_t h, Transition& t) {
  if (t.form == TransitionForm::kDense) return Advance(shape, token, h, nullptr, t.dense);
  for (size_t i = 0; i < t.logs.size(); ++i) {
    t.logs[i] += t.form == TransitionForm::kElementwise ? double{token.beta[i]}
                                                        : LogDecay(shape, token, h, static_cast<int32_t>(i), 0);
  }
}

// T ← T_next T. A transition that vanished stays so: logarithms of −∞.
void Append(const LinearShape& shape, const Transition& next, int32_t h, Transition& t) {
  if (t.form == TransitionForm::kDense) {
    t.dense = Apply(shape, next, h, t.dense);
    return;
  }
  for (size_t i = 0; i < t.logs.size(); ++i) {
    // Σ dt grows where the others' logarithms fall.
    const double gone = t.form == TransitionForm::kElementwise ? INFINITY : -INFINITY;
    t.logs[i] += next.form == TransitionForm::kZero ? gone : next.logs[i];
  }
}

void WriteTuple(const LinearShape& shape, const Transition& t, const Matrix& state, int32_t h, const TupleTarget& to) {
  WriteState(state, shape.order, to.state_dtype, to.state[h],
             to.state_exponents == nullptr ? nullptr : to.state_exponents + h);
  if (to.transition == nullptr) return;
  if (t.form == TransitionForm::kDense) return Write(t.dense, shape.order, to.transition_dtype, to.transition[h]);
  for (size_t i = 0; i < t.logs.size(); ++i) {
    static_cast<float*>(to.transition[h])[i] = static_cast<float>(t.logs[i]);
  }
}

Matrix ReadState(const LinearShape& shape, const StateView& state, int32_t h) {
  return Read(shape.order, state.dtype, state.heads[h], shape.d_k, shape.d_v,
              state.exponents == nullptr ? 0 : state.exponents[h]);
}

void WriteState(const LinearShape& shape, const Matrix& state, int32_t h, const StateView& to) {
  WriteState(state, shape.order, to.dtype, to.heads[h], to.exponents == nullptr ? nullptr : to.exponents + h);
}

}  // namespace

void Compose(const ComposeArgs& args) {
  for (int32_t h = 0; h < args.shape.heads; ++h) {
    Matrix state = ReadState(args.shape, args.state, h);
    for (const TupleView& interior : args.interiors) Compose(args.shape, interior, h, state);
    WriteState(args.shape, state, h, args.state);
  }
}

void ComposeTransitions(const ComposeTransitionsArgs& args) {
  for (int32_t h = 0; h < args.shape.heads; ++h) {
    Transition transition(args.shape);
    Matrix state(args.shape.d_k, args.shape.d_v);
    for (const TupleView& interior : args.interiors) {
      Append(args.shape, ReadTransition(args.shape, interior, h), h, transition);
      Compose(args.shape, interior, h, state);
    }
    WriteTuple(args.shape, transition, state, h, args.tuple);
  }
}

void Capture(const CaptureArgs& args) {
  for (int32_t h = 0; h < args.shape.heads; ++h) {
    Transition transition(args.shape);
    Matrix state(args.shape.d_k, args.shape.d_v);
    for (int64_t t = 0; t < args.inputs.tokens; ++t) {
      const Token token(args.shape, args.inputs, t, h);
      if (args.tuple.transition != nullptr) Advance(args.shape, token, h, transition);
      Advance(args.shape, token, h, token.v, state);
    }
    WriteTuple(args.shape, transition, state, h, args.tuple);
  }
}

void AdvanceSeam(const AdvanceSeamArgs& args) {
  const LinearShape& shape = args.shape;
  for (int32_t h = 0; h < shape.heads; ++h) {
    Matrix state = ReadState(shape, args.state, h);
    for (const SeamStep& step : args.steps) {
      if (step.interior != nullptr) Compose(shape, *step.interior, h, state);
      for (int64_t t = step.begin; step.interior == nullptr && t < step.end; ++t) {
        const Token token(shape, args.inputs, t, h);
        Advance(shape, token, h, token.v, state);
        if (args.out == nullptr) continue;
        float* out = args.out + t * args.out_stride + int64_t{h} * shape.d_v;
        for (int32_t j = 0; j < shape.d_v; ++j) {
          double sum = 0;
          for (int32_t i = 0; i < shape.d_k; ++i) sum += token.q[i] * state(i, j);
          out[j] = static_cast<float>(sum);
        }
      }
      if (step.checkpoint != nullptr) WriteState(shape, state, h, *step.checkpoint);
    }
    WriteState(shape, state, h, args.state);
  }
}

}  // namespace ashlar::kernels::reference
