// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "kernels/testing/backends.h"
#include "kernels/testing/errors.h"
#include "kernels/testing/names.h"
#include "kernels/testing/stored.h"
#include "kernels/testing/vectors.h"

namespace ashlar::kernels::testing {
namespace {

using Numbers = std::vector<double>;

Numbers Transposed(const Numbers& matrix, int32_t rows) {
  const size_t columns = matrix.size() / rows;
  Numbers out(matrix.size());
  for (size_t i = 0; i < matrix.size(); ++i) out[i % columns * rows + i / columns] = matrix[i];
  return out;
}

// C = A B, k-first; mamba1's transitions: element by element.
Numbers Product(const LinearShape& shape, const Numbers& a, const Numbers& b) {
  Numbers out(b.size());
  if (shape.family == Family::kMamba1) {
    std::ranges::transform(a, b, out.begin(), std::multiplies<>());
    return out;
  }
  const size_t n = shape.d_k, columns = b.size() / n;
  for (size_t i = 0; i < n; ++i) {
    for (size_t m = 0; m < n; ++m) {
      for (size_t j = 0; j < columns; ++j) out[i * columns + j] += a[i * n + m] * b[m * columns + j];
    }
  }
  return out;
}

// Heads of one family and size side by side as a layer, in one of the two state orders.
class VectorLayer {
 public:
  VectorLayer(std::vector<const LinearVector*> heads, StateOrder order) : heads_(std::move(heads)) {
    const LinearVector& first = *heads_.front();
    shape_ = {.family = first.family,
              .heads = static_cast<int32_t>(heads_.size()),
              .key_heads = static_cast<int32_t>(heads_.size()),
              .d_k = first.d_k,
              .d_v = first.d_v,
              .order = order};
    for (const LinearVector* head : heads_) Append(head->decay_table, 0, head->decay_table.size(), table_);
    for (int64_t t = 0; t < first.tokens; ++t) {
      for (const LinearVector* head : heads_) {
        Append(head->q, t, first.d_k, q_);
        Append(head->k, t, first.d_k, k_);
        Append(head->v, t, first.d_v, v_);
        if (GateWidth(shape_) > 0) Append(head->gate, t, GateWidth(shape_), gate_);
        if (BetaWidth(shape_) > 0) Append(head->beta, t, BetaWidth(shape_), beta_);
      }
    }
  }
  VectorLayer(const VectorLayer&) = delete;

  LinearShape shape() const {
    LinearShape shape = shape_;
    shape.decay_table = table_.empty() ? nullptr : table_.data();
    return shape;
  }
  const LinearVector& head(int32_t h) const { return *heads_[h]; }
  int64_t tokens() const { return head(0).tokens; }
  size_t segments() const { return head(0).segments.size(); }
  std::string Describe() const {
    return Name(shape_.family) + ", " + std::to_string(shape_.heads) + " heads of " + std::to_string(shape_.d_k) +
           " x " + std::to_string(shape_.d_v) + ", " + std::to_string(tokens()) + " tokens in " +
           std::to_string(segments()) + " segments, " +
           (shape_.order == StateOrder::kKeyFirst ? "key first" : "value first");
  }

  TokenInputs Inputs() const {
    const int64_t heads = shape_.heads;
    return {.tokens = tokens(),
            .q = q_.data(),
            .k = k_.data(),
            .v = v_.data(),
            .g = gate_.empty() ? nullptr : gate_.data(),
            .beta = beta_.empty() ? nullptr : beta_.data(),
            .q_stride = heads * shape_.d_k,
            .k_stride = heads * shape_.d_k,
            .v_stride = heads * shape_.d_v,
            .g_stride = heads * GateWidth(shape_),
            .beta_stride = heads * BetaWidth(shape_)};
  }
  // Only the tokens [begin, end).
  TokenInputs Inputs(int64_t begin, int64_t end) const {
    TokenInputs inputs = Inputs();
    inputs.tokens = end - begin;
    inputs.q += begin * inputs.q_stride;
    inputs.k += begin * inputs.k_stride;
    inputs.v += begin * inputs.v_stride;
    if (inputs.g != nullptr) inputs.g += begin * inputs.g_stride;
    if (inputs.beta != nullptr) inputs.beta += begin * inputs.beta_stride;
    return inputs;
  }

  // Matrices of the file in the order of the layer's memory, and back: transposing is its own inverse.
  Numbers InOrder(const Numbers& matrix) const {
    return shape_.order == StateOrder::kKeyFirst ? matrix : Transposed(matrix, shape_.d_k);
  }
  Numbers KeyFirst(const Numbers& matrix) const {
    const auto columns = static_cast<int32_t>(matrix.size() / shape_.d_k);
    return shape_.order == StateOrder::kKeyFirst ? matrix : Transposed(matrix, columns);
  }

  States InitialState() const {
    States state(shape_, DType::kF32);
    for (int32_t h = 0; h < shape_.heads; ++h) state.Set(h, InOrder(head(h).initial_state));
    return state;
  }
  Tuple SegmentTuple(size_t segment) const {
    Tuple tuple(shape(), {});
    for (int32_t h = 0; h < shape_.heads; ++h) {
      const LinearVector::Segment& from = head(h).segments[segment];
      tuple.SetTransition(h, Stored(h, segment));
      tuple.states().Set(h, InOrder(from.state));
    }
    return tuple;
  }
  // A head's stored transition as the file's matrix.
  Numbers MatrixOf(const Tuple& tuple, int32_t h) const;

 private:
  static void Append(const Numbers& from, int64_t row, int64_t width, std::vector<float>& to) {
    to.insert(to.end(), from.begin() + row * width, from.begin() + (row + 1) * width);
  }
  // The file's transition of a segment in the family's natural form.
  Numbers Stored(int32_t h, size_t segment) const;
  // Σ dt of a channel over a segment, of which `matrix` is the transition: mamba1.
  double SumOfSteps(int32_t h, size_t segment, const Numbers& matrix, int32_t channel) const;

  std::vector<const LinearVector*> heads_;
  LinearShape shape_;
  std::vector<float> q_, k_, v_, gate_, beta_, table_;
};

double VectorLayer::SumOfSteps(int32_t h, size_t segment, const Numbers& matrix, int32_t channel) const {
  const int32_t d_v = shape_.d_v;
  // From the element that decays fastest and still has all its digits.
  double fastest = 0, sum = 0;
  for (int32_t i = 0; i < shape_.d_k; ++i) {
    const double a = head(h).decay_table[i * d_v + channel], t = matrix[i * d_v + channel];
    if (t < 1e-200 || a >= fastest) continue;
    fastest = a;
    sum = std::log(t) / a;
  }
  if (fastest < 0) return sum;
  // If no element determines the sum, it comes from the tokens.
  int64_t begin = 0;
  for (size_t i = 0; i < segment; ++i) begin += head(h).segments[i].tokens;
  for (int64_t t = begin; t < begin + head(h).segments[segment].tokens; ++t) sum += head(h).beta[t * d_v + channel];
  return sum;
}

Numbers VectorLayer::Stored(int32_t h, size_t segment) const {
  const Numbers& matrix = head(h).segments[segment].transition;
  const int32_t d_k = shape_.d_k;
  Numbers stored;
  switch (NaturalForm(shape_.family)) {
    case TransitionForm::kScalar:
      return {std::log(matrix[0])};
    case TransitionForm::kDiagonal:
      for (int32_t i = 0; i < d_k; ++i) stored.push_back(std::log(matrix[i * d_k + i]));
      return stored;
    case TransitionForm::kElementwise:
      for (int32_t j = 0; j < shape_.d_v; ++j) stored.push_back(SumOfSteps(h, segment, matrix, j));
      return stored;
    default:
      return InOrder(matrix);
  }
}

Numbers VectorLayer::MatrixOf(const Tuple& tuple, int32_t h) const {
  const int32_t d_k = shape_.d_k, d_v = shape_.d_v;
  const Numbers stored = tuple.Transition(h);
  const TransitionForm form = NaturalForm(shape_.family);
  if (form == TransitionForm::kDense) return KeyFirst(stored);
  Numbers matrix(form == TransitionForm::kElementwise ? d_k * d_v : d_k * d_k);
  for (int32_t i = 0; i < d_k; ++i) {
    if (form != TransitionForm::kElementwise) {
      matrix[i * d_k + i] = std::exp(stored[form == TransitionForm::kScalar ? 0 : i]);
      continue;
    }
    for (int32_t j = 0; j < d_v; ++j) matrix[i * d_v + j] = std::exp(head(h).decay_table[i * d_v + j] * stored[j]);
  }
  return matrix;
}

// A transition is a contraction whose error matters absolutely: no error counts relative to a norm below 0.1.
double MatrixError(const Numbers& actual, const Numbers& expected) {
  return AbsoluteError(actual, expected) / std::max(Norm(expected), kTransitionFloor / kTolerance);
}

// Runs the operations on one layer.
class LinearChecker {
 public:
  LinearChecker(const VectorLayer& layer, const Kernels& kernels, std::vector<VectorCheck>& checks)
      : layer_(layer), shape_(layer.shape()), runner_(kernels), checks_(checks) {
    for (size_t i = 0; i < layer.segments(); ++i) tuples_.push_back(layer.SegmentTuple(i));
    for (const Tuple& tuple : tuples_) views_.push_back(tuple.View());
  }

  void Run() {
    Capture();
    Compose();
    ComposeTransitions();
    // All tokens; and every second segment, with the other segments cached.
    AdvanceSeam("one run", [](size_t) { return true; });
    AdvanceSeam("odd segments run", [](size_t i) { return i % 2 == 1; });
    AdvanceSeam("even segments run", [](size_t i) { return i % 2 == 0; });
  }

 private:
  void Add(const char* operation, const std::string& what, double error) {
    checks_.push_back({operation, what, layer_.Describe(), error, kTolerance});
  }
  double FinalError(const States& state) const {
    double worst = 0;
    for (int32_t h = 0; h < shape_.heads; ++h) {
      worst = std::max(worst, RelativeError(state.Values(h), layer_.InOrder(layer_.head(h).final_state)));
    }
    return worst;
  }

  void Capture() {
    double transition_error = 0, state_error = 0;
    int64_t begin = 0;
    for (size_t i = 0; i < layer_.segments(); ++i) {
      const int64_t end = begin + layer_.head(0).segments[i].tokens;
      Tuple tuple(shape_, {});
      runner_.Run(CaptureArgs{.shape = shape_, .inputs = layer_.Inputs(begin, end), .tuple = tuple.Target()});
      for (int32_t h = 0; h < shape_.heads; ++h) {
        const LinearVector::Segment& expected = layer_.head(h).segments[i];
        transition_error = std::max(transition_error, MatrixError(layer_.MatrixOf(tuple, h), expected.transition));
        state_error = std::max(state_error, RelativeError(tuple.states().Values(h), layer_.InOrder(expected.state)));
      }
      begin = end;
    }
    Add("Capture", "transitions", transition_error);
    Add("Capture", "end states", state_error);
  }

  void Compose() {
    States state = layer_.InitialState();
    runner_.Run(ComposeArgs{.shape = shape_, .interiors = views_, .state = state.View()});
    Add("Compose", "final state", FinalError(state));
  }

  void ComposeTransitions() {
    Tuple chain(shape_, {});
    runner_.Run(ComposeTransitionsArgs{.shape = shape_, .interiors = views_, .tuple = chain.Target()});
    double transition_error = 0, state_error = 0;
    for (int32_t h = 0; h < shape_.heads; ++h) {
      Numbers transition = layer_.head(h).segments[0].transition, state = layer_.head(h).segments[0].state;
      for (size_t i = 1; i < layer_.segments(); ++i) {
        const LinearVector::Segment& next = layer_.head(h).segments[i];
        transition = Product(shape_, next.transition, transition);
        state = Product(shape_, next.transition, state);
        for (size_t j = 0; j < state.size(); ++j) state[j] += next.state[j];
      }
      transition_error = std::max(transition_error, MatrixError(layer_.MatrixOf(chain, h), transition));
      state_error = std::max(state_error, RelativeError(chain.states().Values(h), layer_.InOrder(state)));
    }
    Add("ComposeTransitions", "transition", transition_error);
    Add("ComposeTransitions", "end state", state_error);

    const TupleView view = chain.View();
    States state = layer_.InitialState();
    runner_.Run(ComposeArgs{.shape = shape_, .interiors = {&view, 1}, .state = state.View()});
    Add("ComposeTransitions", "final state by one tuple", FinalError(state));
  }

  template <typename Runs>
  void AdvanceSeam(const std::string& name, Runs&& runs) {
    const int64_t row = int64_t{shape_.heads} * shape_.d_v;
    std::vector<SeamStep> steps;
    std::vector<bool> computed(layer_.tokens());
    int64_t begin = 0;
    for (size_t i = 0; i < layer_.segments(); ++i) {
      const int64_t end = begin + layer_.head(0).segments[i].tokens;
      steps.push_back(runs(i) ? SeamStep{.begin = begin, .end = end} : SeamStep{.interior = &views_[i]});
      std::fill(computed.begin() + begin, computed.begin() + end, runs(i));
      begin = end;
    }
    std::vector<float> out(layer_.tokens() * row, std::numeric_limits<float>::quiet_NaN());
    States state = layer_.InitialState();
    runner_.Run(AdvanceSeamArgs{.shape = shape_,
                                .steps = steps,
                                .inputs = layer_.Inputs(),
                                .state = state.View(),
                                .out = out.data(),
                                .out_stride = row});
    double error = 0;
    for (int32_t h = 0; h < shape_.heads; ++h) {
      Numbers actual, expected;
      for (int64_t t = 0; t < layer_.tokens(); ++t) {
        if (!computed[t]) continue;
        const float* from = out.data() + t * row + int64_t{h} * shape_.d_v;
        actual.insert(actual.end(), from, from + shape_.d_v);
        const auto truth = layer_.head(h).outputs.begin() + t * shape_.d_v;
        expected.insert(expected.end(), truth, truth + shape_.d_v);
      }
      error = std::max(error, RelativeError(actual, expected));
    }
    Add("AdvanceSeam", "outputs, " + name, error);
    Add("AdvanceSeam", "final state, " + name, FinalError(state));
  }

  const VectorLayer& layer_;
  const LinearShape shape_;
  Runner runner_;
  std::vector<VectorCheck>& checks_;
  std::vector<Tuple> tuples_;
  std::vector<TupleView> views_;
};

bool MayShareALayer(const LinearVector& a, const LinearVector& b) {
  return a.family == b.family && a.d_k == b.d_k && a.d_v == b.d_v &&
         std::ranges::equal(a.segments, b.segments, {}, &LinearVector::Segment::tokens, &LinearVector::Segment::tokens);
}

}  // namespace

std::vector<VectorCheck> CheckLinear(const std::vector<LinearVector>& vectors, const Kernels& kernels) {
  std::vector<std::vector<const LinearVector*>> layers;
  for (const LinearVector& vector : vectors) {
    const auto layer =
        std::ranges::find_if(layers, [&](const auto& heads) { return MayShareALayer(*heads.front(), vector); });
    if (layer == layers.end()) {
      layers.push_back({&vector});
    } else {
      layer->push_back(&vector);
    }
  }
  std::vector<VectorCheck> checks;
  for (const std::vector<const LinearVector*>& heads : layers) {
    for (const StateOrder order : {StateOrder::kKeyFirst, StateOrder::kValueFirst}) {
      const VectorLayer layer(heads, order);
      LinearChecker(layer, kernels, checks).Run();
    }
  }
  return checks;
}

}  // namespace ashlar::kernels::testing
