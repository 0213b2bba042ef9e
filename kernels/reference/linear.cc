// SPDX-License-Identifier: Apache-2.0
// The recurrence and its composition in plain loops, fp64 throughout (HYPIC equations 2, 4 and 6; all families).
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/reference/recurrence.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/row.h"

namespace ashlar::kernels::reference {
namespace {

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
      out.dense = ReadMatrix(shape.order, tuple.transition_dtype, head.transition, shape.d_k, shape.d_k);
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

// Returns the decay of head h's element (i, j) of a state under a transition that is no matrix.
double DecayOf(const LinearShape& shape, const Transition& t, int32_t h, int32_t i, int32_t j) {
  switch (t.form) {
    case TransitionForm::kScalar:
      return std::exp(t.logs[0]);
    case TransitionForm::kDiagonal:
      return std::exp(t.logs[i]);
    case TransitionForm::kElementwise:
      if (std::isinf(t.logs[j])) return 0;  // composed with a transition of zero; A itself may be zero
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
    if (matrix) {  // along rows of X: the order of sums is the same, and the compiler can vectorise
      for (int32_t m = 0; m < x.rows; ++m) {
        for (int32_t j = 0; j < x.columns; ++j) out(i, j) += t.dense(i, m) * x(m, j);
      }
    } else if (t.form != TransitionForm::kZero) {
      for (int32_t j = 0; j < x.columns; ++j) out(i, j) = DecayOf(shape, t, h, i, j) * x(i, j);
    }
  }
  return out;
}

// R(position) on the key axis: each column is rotated like a key.
void TurnState(const Rotation& rotation, int64_t position, Matrix& state) {
  if (rotation.style == RopeStyle::kNone) return;
  std::vector<double> column(static_cast<size_t>(state.rows));
  for (int32_t j = 0; j < state.columns; ++j) {
    for (int32_t i = 0; i < state.rows; ++i) column[i] = state(i, j);
    Turn(rotation, position, column.data());
    for (int32_t i = 0; i < state.rows; ++i) state(i, j) = column[i];
  }
}

// S ← T S + R(position) S_C.
void Compose(const LinearShape& shape, const TupleView& tuple, int32_t h, Matrix& state) {
  const HeadTuple& head = tuple.heads[h];
  Matrix end = ReadMatrix(shape.order, tuple.state_dtype, head.state, shape.d_k, shape.d_v, head.state_exponent);
  TurnState(shape.rotation, tuple.position, end);
  state = Apply(shape, ReadTransition(shape, tuple, h), h, state);
  for (size_t i = 0; i < state.values.size(); ++i) state.values[i] += end.values[i];
}

// T ← T_t T.
void Advance(const LinearShape& shape, const Token& token, int32_t h, Transition& t) {
  if (t.form == TransitionForm::kDense) return Advance(shape, token, h, nullptr, t.dense);
  for (size_t i = 0; i < t.logs.size(); ++i) {
    t.logs[i] += t.form == TransitionForm::kElementwise ? double{token.beta[i]}
                                                        : LogDecay(shape, token, h, static_cast<int32_t>(i), 0);
  }
}

// T ← T_next T. A transition that vanished stays zero: logarithms of −∞.
void Append(const LinearShape& shape, const Transition& next, int32_t h, Transition& t) {
  if (t.form == TransitionForm::kDense) {
    t.dense = Apply(shape, next, h, t.dense);
    return;
  }
  for (size_t i = 0; i < t.logs.size(); ++i) {
    // For elementwise forms `logs` is Σ dt and the exponent is A Σ dt with A ≤ 0, so a vanished transition is +∞.
    const double gone = t.form == TransitionForm::kElementwise ? INFINITY : -INFINITY;
    t.logs[i] += next.form == TransitionForm::kZero ? gone : next.logs[i];
  }
}

void WriteTuple(const LinearShape& shape, const Transition& t, const Matrix& state, int32_t h, const TupleTarget& to) {
  WriteState(state, shape.order, to.state_dtype, to.state[h],
             to.state_exponents == nullptr ? nullptr : to.state_exponents + h);
  if (to.transition == nullptr) return;
  if (t.form == TransitionForm::kDense) return WriteMatrix(t.dense, shape.order, to.transition_dtype, to.transition[h]);
  for (size_t i = 0; i < t.logs.size(); ++i) {
    static_cast<float*>(to.transition[h])[i] = static_cast<float>(t.logs[i]);
  }
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
    for (int32_t i = 0; args.decay != nullptr && i < args.shape.d_k; ++i) {
      const int32_t width = GateWidth(args.shape);
      double product = 1;
      for (int64_t t = 0; width > 0 && t < args.inputs.tokens; ++t) {
        product *= std::exp(double{args.inputs.g[t * args.inputs.g_stride + int64_t{h} * width + i % width]});
      }
      args.decay[int64_t{h} * args.shape.d_k + i] = static_cast<float>(product);
    }
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
        ReadOut(state, token.q, args.out + t * args.out_stride + int64_t{h} * shape.d_v);
      }
      if (step.checkpoint != nullptr) WriteState(shape, state, h, *step.checkpoint);
    }
    WriteState(shape, state, h, args.state);
  }
}

}  // namespace ashlar::kernels::reference
