#include "kernels/testing/linear_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/testing/backends.h"

namespace ashlar::kernels::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double Norm(std::span<const float> a) {
  return std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0));
}

double Distance(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = double{a[i]} - double{b[i]};
    sum += difference * difference;
  }
  return std::isfinite(sum) ? std::sqrt(sum) : std::numeric_limits<double>::infinity();
}

void Normalise(std::span<float> row) {
  const double norm = std::max(Norm(row), 1e-20);
  for (float& value : row) value = static_cast<float>(value / norm);
}

// Random directions of one key head from which its keys are drawn.
class KeySource {
 public:
  KeySource(Random& random, int32_t d_k, Keys keys) : random_(random), d_k_(d_k), keys_(keys) {
    const int32_t directions = keys == Keys::kRandom ? 0 : keys == Keys::kCorrelated ? 1 : std::max(1, d_k / 5);
    for (int32_t i = 0; i < directions; ++i) directions_.push_back(random.Normals(d_k));
  }

  void Draw(std::span<float> key) {
    const bool free = keys_ != Keys::kSubspace;
    for (int32_t i = 0; i < d_k_; ++i) key[i] = free ? static_cast<float>(random_.Normal()) : 0.0f;
    for (const std::vector<float>& direction : directions_) {
      const double weight = keys_ == Keys::kCorrelated ? 2.0 : random_.Normal();
      for (int32_t i = 0; i < d_k_; ++i) key[i] += static_cast<float>(weight * direction[i]);
    }
    Normalise(key);
  }

 private:
  Random& random_;
  const int32_t d_k_;
  const Keys keys_;
  std::vector<std::vector<float>> directions_;
};

double LogDecay(Random& random, Decay decay, int32_t head) {
  if (decay == Decay::kByHead) decay = std::array{Decay::kSlow, Decay::kFast, Decay::kNone}[head % 3];
  if (decay == Decay::kNone) return 0;
  return decay == Decay::kSlow ? -random.Uniform(0, 2e-3) : -random.Uniform(0.05, 2);
}

int64_t OddStride(Random& random, int64_t width) {
  return width + random.Integer(0, 3);
}

}  // namespace

double RelativeError(std::span<const float> a, std::span<const float> b) {
  return Distance(a, b) / std::max(Norm(b), 1e-30);
}

double RelativeError(const HeadMatrices& a, const HeadMatrices& b) {
  double worst = a.heads() == b.heads() ? 0 : std::numeric_limits<double>::infinity();
  for (int32_t h = 0; h < b.heads(); ++h) worst = std::max(worst, RelativeError(a[h], b[h]));
  return worst;
}

double TransitionError(const HeadMatrices& a, const HeadMatrices& b) {
  double worst = a.heads() == b.heads() ? 0 : std::numeric_limits<double>::infinity();
  for (int32_t h = 0; h < b.heads(); ++h) {
    worst = std::max(worst, Distance(a[h], b[h]) / (kTolerance * Norm(b[h]) + kTransitionFloor));
  }
  return worst;
}

TokenInputs Tokens::View(int64_t begin, int64_t end) const {
  return {.tokens = end - begin,
          .q = q.data() + begin * q_stride,
          .k = k.data() + begin * k_stride,
          .v = v.data() + begin * v_stride,
          .g = g.data() + begin * g_stride,
          .beta = beta.data() + begin * beta_stride,
          .q_stride = q_stride,
          .k_stride = k_stride,
          .v_stride = v_stride,
          .g_stride = g_stride,
          .beta_stride = beta_stride};
}

void Tokens::Poison(int64_t begin, int64_t end) {
  const auto poison = [&](std::vector<float>& values, int64_t stride) {
    std::fill(values.begin() + begin * stride, values.begin() + end * stride, kNan);
  };
  poison(q, q_stride);
  poison(k, k_stride);
  poison(v, v_stride);
  poison(g, g_stride);
  poison(beta, beta_stride);
}

LinearShape RandomShape(Random& random, StateOrder order, int32_t largest_dim) {
  LinearShape shape;
  shape.key_heads = static_cast<int32_t>(random.Integer(1, 2));
  shape.heads = shape.key_heads * static_cast<int32_t>(random.Integer(1, 3));
  shape.d_k = static_cast<int32_t>(random.Integer(2, largest_dim));
  // A state of one or two numbers may cancel to nearly nothing; then no fp32 result is near it, relatively.
  do {
    shape.d_v = static_cast<int32_t>(random.Integer(3, largest_dim));
  } while (shape.d_v == shape.d_k);
  shape.order = order;
  return shape;
}

Tokens RandomTokens(Random& random, const LinearShape& shape, int64_t count, Character character) {
  Tokens tokens;
  tokens.count = count;
  tokens.q_stride = OddStride(random, int64_t{shape.key_heads} * shape.d_k);
  tokens.k_stride = OddStride(random, int64_t{shape.key_heads} * shape.d_k);
  tokens.v_stride = OddStride(random, int64_t{shape.heads} * shape.d_v);
  tokens.g_stride = OddStride(random, shape.heads);
  tokens.beta_stride = OddStride(random, shape.heads);
  tokens.q.assign(count * tokens.q_stride, kNan);
  tokens.k.assign(count * tokens.k_stride, kNan);
  tokens.v.assign(count * tokens.v_stride, kNan);
  tokens.g.assign(count * tokens.g_stride, kNan);
  tokens.beta.assign(count * tokens.beta_stride, kNan);

  std::vector<KeySource> sources;
  for (int32_t h = 0; h < shape.key_heads; ++h) sources.emplace_back(random, shape.d_k, character.keys);
  for (int64_t t = 0; t < count; ++t) {
    for (int32_t h = 0; h < shape.key_heads; ++h) {
      sources[h].Draw({tokens.k.data() + t * tokens.k_stride + h * shape.d_k, static_cast<size_t>(shape.d_k)});
      float* q = tokens.q.data() + t * tokens.q_stride + h * shape.d_k;
      for (int32_t i = 0; i < shape.d_k; ++i) q[i] = static_cast<float>(random.Normal() / shape.d_k);
    }
    for (int32_t h = 0; h < shape.heads; ++h) {
      float* v = tokens.v.data() + t * tokens.v_stride + h * shape.d_v;
      for (int32_t j = 0; j < shape.d_v; ++j) v[j] = static_cast<float>(random.Normal());
      tokens.g[t * tokens.g_stride + h] = static_cast<float>(LogDecay(random, character.decay, h));
      tokens.beta[t * tokens.beta_stride + h] = static_cast<float>(random.Uniform(0.05, 1));
    }
  }
  return tokens;
}

HeadMatrices RandomState(Random& random, const LinearShape& shape) {
  HeadMatrices state(shape.heads, int64_t{shape.d_k} * shape.d_v);
  for (int32_t h = 0; h < shape.heads; ++h) state[h] = random.Normals(state[h].size());
  return state;
}

Tuple CaptureByReference(const LinearShape& shape, const Tokens& tokens, int64_t begin, int64_t end) {
  Tuple tuple(shape);
  Runner(Reference())
      .Run(CaptureArgs{.shape = shape,
                       .inputs = tokens.View(begin, end),
                       .transition = tuple.transition.pointers(),
                       .state = tuple.state.pointers()});
  return tuple;
}

Prompt::Prompt(Random& random, const LinearShape& shape_in, int interiors, Character character)
    : shape(shape_in), initial(RandomState(random, shape_in)) {
  int64_t at = 0;
  const auto add = [&](bool interior, int64_t length) {
    parts.push_back({interior, at, at + length});
    at += length;
  };
  for (int i = 0; i < interiors; ++i) {
    add(false, random.Integer(0, 9));
    add(true, random.Integer(1, 14));
  }
  add(false, random.Integer(0, 70));
  tokens = RandomTokens(random, shape, at, character);
  for (const Part& part : parts) {
    if (part.interior) tuples.push_back(CaptureByReference(shape, tokens, part.begin, part.end));
  }
  for (const Tuple& tuple : tuples) views.push_back(tuple.view());
}

std::vector<SeamStep> Prompt::Steps() const {
  std::vector<SeamStep> steps;
  const TupleView* next = views.data();
  for (const Part& part : parts) {
    steps.push_back(part.interior ? SeamStep{.interior = next++} : SeamStep{.begin = part.begin, .end = part.end});
  }
  return steps;
}

Tokens Prompt::RunInputs() const {
  Tokens inputs = tokens;
  for (const Part& part : parts) {
    if (part.interior) inputs.Poison(part.begin, part.end);
  }
  return inputs;
}

FullPass::FullPass(const Prompt& prompt)
    : state(prompt.initial), out(prompt.tokens.count * prompt.shape.heads * prompt.shape.d_v) {
  const SeamStep all = {.begin = 0, .end = prompt.tokens.count};
  Runner(Reference())
      .Run(AdvanceSeamArgs{.shape = prompt.shape,
                           .steps = {&all, 1},
                           .inputs = prompt.tokens.View(),
                           .state = state.pointers(),
                           .out = out.data(),
                           .out_stride = int64_t{prompt.shape.heads} * prompt.shape.d_v});
}

}  // namespace ashlar::kernels::testing
