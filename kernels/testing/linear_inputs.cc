// SPDX-License-Identifier: Apache-2.0
#include "kernels/testing/linear_inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

namespace ashlar::kernels::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// Middle of mamba's dt: its decay table is divided by it, so that tokens decay according to their character.
constexpr double kMeanStep = 0.25;

void Normalise(std::span<float> row) {
  const double norm = std::max(std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0)), 1e-20);
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
  if (decay == Decay::kMedium) return -random.Uniform(0.01, 0.1);
  return decay == Decay::kSlow ? -random.Uniform(0, 2e-3) : -random.Uniform(0.05, 2);
}

bool IsMamba(Family family) {
  return family == Family::kMamba1 || family == Family::kMamba2;
}

// Numbers that a family's decay table has for one head.
int64_t TableWidth(const LinearShape& shape) {
  if (shape.family == Family::kMamba1) return int64_t{shape.d_k} * shape.d_v;
  return NaturalForm(shape.family) == TransitionForm::kScalar ? 1 : 0;
}

int64_t OddStride(Random& random, int64_t width) {
  return width + random.Integer(0, 3);
}

std::vector<float> Blank(int64_t count, int64_t stride, bool exists = true) {
  return std::vector<float>(exists ? count * stride : 0, kNan);
}

void DrawToken(Random& random, const Layer& layer, std::vector<KeySource>& sources, int64_t t, Tokens& tokens) {
  const LinearShape shape = layer.shape();
  const auto d_k = static_cast<size_t>(shape.d_k);
  for (int32_t h = 0; h < shape.key_heads; ++h) {
    sources[h].Draw({tokens.k.data() + t * tokens.k_stride + h * shape.d_k, d_k});
    float* q = tokens.q.data() + t * tokens.q_stride + h * shape.d_k;
    for (int32_t i = 0; i < shape.d_k; ++i) q[i] = static_cast<float>(random.Normal() / shape.d_k);
  }
  for (int32_t h = 0; h < shape.heads; ++h) {
    float* v = tokens.v.data() + t * tokens.v_stride + h * shape.d_v;
    for (int32_t j = 0; j < shape.d_v; ++j) v[j] = static_cast<float>(layer.character().magnitude * random.Normal());
    for (int32_t i = 0; i < GateWidth(shape); ++i) {
      tokens.g[t * tokens.g_stride + h * GateWidth(shape) + i] =
          static_cast<float>(LogDecay(random, layer.character().decay, h));
    }
    for (int32_t i = 0; i < BetaWidth(shape); ++i) {
      tokens.beta[t * tokens.beta_stride + h * BetaWidth(shape) + i] =
          static_cast<float>(IsMamba(shape.family) ? random.Uniform(0.02, 2 * kMeanStep) : random.Uniform(0.05, 1));
    }
  }
}

}  // namespace

Layer::Layer(Random& random, LinearShape shape, Character character) : shape_(shape), character_(character) {
  for (int32_t h = 0; h < shape.heads; ++h) {
    for (int64_t i = 0; i < TableWidth(shape); ++i) {
      const double decay = LogDecay(random, character.decay, h);
      decay_table_.push_back(static_cast<float>(IsMamba(shape.family) ? decay / kMeanStep : decay));
    }
  }
  if (shape.family != Family::kLightning || shape.d_k < 2) return;
  shape_.rotation.style = random.Integer(0, 1) == 0 ? RopeStyle::kHalfSplit : RopeStyle::kInterleaved;
  shape_.rotation.rotary_dim = 2 * static_cast<int32_t>(random.Integer(std::max(1, shape.d_k / 4), shape.d_k / 2));
  const int32_t rotary_dim = shape_.rotation.rotary_dim;
  for (int32_t i = 0; i < rotary_dim / 2; ++i) frequencies_.push_back(std::pow(1e4, -2.0 * i / rotary_dim));
}

LinearShape Layer::shape() const {
  LinearShape shape = shape_;
  shape.decay_table = decay_table_.empty() ? nullptr : decay_table_.data();
  shape.rotation.frequencies = frequencies_.data();
  return shape;
}

Layer RandomLayer(Random& random, Family family, StateOrder order, int32_t largest_dim, Character character) {
  LinearShape shape = {.family = family, .order = order};
  shape.key_heads = static_cast<int32_t>(random.Integer(1, 2));
  shape.heads = shape.key_heads * static_cast<int32_t>(random.Integer(1, 3));
  shape.d_k = static_cast<int32_t>(random.Integer(2, largest_dim));
  // A state of one or two numbers may cancel to nearly nothing; then no fp32 result is relatively near it.
  do {
    shape.d_v = static_cast<int32_t>(random.Integer(3, largest_dim));
  } while (shape.d_v == shape.d_k);
  return Layer(random, shape, character);
}

std::ostream& operator<<(std::ostream& out, const Layer& layer) {
  const LinearShape shape = layer.shape();
  return out << Name(shape.family) << ", " << shape.heads << " heads of " << shape.key_heads << ", d_k " << shape.d_k
             << ", d_v " << shape.d_v << ", keys " << static_cast<int>(layer.character().keys) << ", decay "
             << static_cast<int>(layer.character().decay) << ", magnitude " << layer.character().magnitude;
}

std::ostream& operator<<(std::ostream& out, Dtypes dtypes) {
  return out << "T " << Name(dtypes.transition) << ", S " << Name(dtypes.state) << ", running " << Name(dtypes.running);
}

TokenInputs Tokens::View(int64_t begin, int64_t end) const {
  return {.tokens = end - begin,
          .q = q.data() + begin * q_stride,
          .k = k.data() + begin * k_stride,
          .v = v.data() + begin * v_stride,
          .g = g.empty() ? nullptr : g.data() + begin * g_stride,
          .beta = beta.empty() ? nullptr : beta.data() + begin * beta_stride,
          .q_stride = q_stride,
          .k_stride = k_stride,
          .v_stride = v_stride,
          .g_stride = g_stride,
          .beta_stride = beta_stride};
}

void Tokens::Poison(int64_t begin, int64_t end) {
  const auto poison = [&](std::vector<float>& values, int64_t stride) {
    if (!values.empty()) std::fill(values.begin() + begin * stride, values.begin() + end * stride, kNan);
  };
  poison(q, q_stride);
  poison(k, k_stride);
  poison(v, v_stride);
  poison(g, g_stride);
  poison(beta, beta_stride);
}

Tokens RandomTokens(Random& random, const Layer& layer, int64_t count) {
  const LinearShape shape = layer.shape();
  Tokens tokens;
  tokens.count = count;
  tokens.q_stride = OddStride(random, int64_t{shape.key_heads} * shape.d_k);
  tokens.k_stride = OddStride(random, int64_t{shape.key_heads} * shape.d_k);
  tokens.v_stride = OddStride(random, int64_t{shape.heads} * shape.d_v);
  tokens.g_stride = OddStride(random, int64_t{shape.heads} * GateWidth(shape));
  tokens.beta_stride = OddStride(random, int64_t{shape.heads} * BetaWidth(shape));
  tokens.q = Blank(count, tokens.q_stride);
  tokens.k = Blank(count, tokens.k_stride);
  tokens.v = Blank(count, tokens.v_stride);
  tokens.g = Blank(count, tokens.g_stride, GateWidth(shape) > 0);
  tokens.beta = Blank(count, tokens.beta_stride, BetaWidth(shape) > 0);

  std::vector<KeySource> sources;
  for (int32_t h = 0; h < shape.key_heads; ++h) sources.emplace_back(random, shape.d_k, layer.character().keys);
  for (int64_t t = 0; t < count; ++t) DrawToken(random, layer, sources, t, tokens);
  return tokens;
}

void Turn(const LinearShape& shape, Tokens& tokens, int64_t begin, int64_t end, int64_t position) {
  if (shape.rotation.style == RopeStyle::kNone) return;
  Runner runner(Reference());
  for (int64_t t = begin; t < end; ++t) {
    for (float* rows : {tokens.q.data() + t * tokens.q_stride, tokens.k.data() + t * tokens.k_stride}) {
      runner.Run(RotateKeysArgs{.rotation = shape.rotation,
                                .delta = position + t - begin,
                                .rows = shape.key_heads,
                                .dim = shape.d_k,
                                .source = rows,
                                .target = rows});
    }
  }
}

States RandomState(Random& random, const Layer& layer, DType dtype) {
  States state(layer.shape(), dtype);
  for (int32_t h = 0; h < state.heads(); ++h) {
    std::vector<double> values(state.count());
    for (double& value : values) value = layer.character().magnitude * random.Normal();
    state.Set(h, values);
  }
  return state;
}

Tuple Capture(Runner& runner, const LinearShape& shape, const TokenInputs& inputs, Dtypes dtypes) {
  Tuple tuple(shape, dtypes);
  runner.Run(CaptureArgs{.shape = shape, .inputs = inputs, .tuple = tuple.Target()});
  return tuple;
}

Tuple ComposeTuples(Runner& runner, const LinearShape& shape, std::span<const TupleView> chain, Dtypes dtypes) {
  Tuple tuple(shape, dtypes);
  runner.Run(ComposeTransitionsArgs{.shape = shape, .interiors = chain, .tuple = tuple.Target()});
  return tuple;
}

States Compose(Runner& runner, const LinearShape& shape, std::span<const TupleView> chain, const States& initial) {
  States state = initial;
  runner.Run(ComposeArgs{.shape = shape, .interiors = chain, .state = state.View()});
  return state;
}

// T = diag(d) + Aᵀ B through one token: T ← (I − β k kᵀ) diag(decay) T adds the row −k to A, β kᵀ diag(decay) T to B.
Tuple CaptureFactors(const LinearShape& shape, const Tokens& tokens, int64_t begin, int64_t end) {
  Runner runner(Reference());
  Tuple tuple = Capture(runner, shape, tokens.View(begin, end));
  const int32_t n = shape.d_k;
  for (int32_t h = 0; h < shape.heads; ++h) {
    std::vector<double> d(n, 1.0), a, b;
    for (int64_t t = begin; t < end; ++t) {
      const float* k = tokens.k.data() + t * tokens.k_stride + int64_t{h / (shape.heads / shape.key_heads)} * n;
      const double beta = tokens.beta[t * tokens.beta_stride + h];
      for (int32_t i = 0; i < n; ++i) {
        const int32_t gate = GateWidth(shape) == 1 ? h : h * n + i;
        const double decay = GateWidth(shape) == 0 ? 1.0 : std::exp(double{tokens.g[t * tokens.g_stride + gate]});
        d[i] *= decay;
        for (size_t r = 0; r < a.size() / n; ++r) a[r * n + i] *= decay;
      }
      std::vector<double> row(n);  // kᵀ (diag(d) + Aᵀ B)
      for (int32_t i = 0; i < n; ++i) row[i] = k[i] * d[i];
      for (size_t r = 0; r < a.size() / n; ++r) {
        const double weight = std::inner_product(k, k + n, a.begin() + r * n, 0.0);
        for (int32_t i = 0; i < n; ++i) row[i] += weight * b[r * n + i];
      }
      for (int32_t i = 0; i < n; ++i) a.push_back(-double{k[i]});
      for (int32_t i = 0; i < n; ++i) b.push_back(beta * row[i]);
    }
    tuple.MakeLowRank(h, {d, a, b});
  }
  return tuple;
}

std::vector<Tuple> Rounded(const std::vector<Tuple>& tuples, Dtypes dtypes) {
  std::vector<Tuple> rounded;
  for (const Tuple& tuple : tuples) rounded.push_back(tuple.Rounded(dtypes));
  return rounded;
}

std::vector<TupleView> Views(const std::vector<Tuple>& tuples) {
  std::vector<TupleView> views;
  for (const Tuple& tuple : tuples) views.push_back(tuple.View());
  return views;
}

Prompt::Prompt(Random& random, const Layer& layer_in, Lengths lengths)
    : layer(layer_in), shape(layer.shape()), start(random.Integer(0, 100'000)), initial(RandomState(random, layer)) {
  int64_t at = 0;
  for (int i = 0; i < lengths.interiors; ++i) {
    const int64_t run = random.Integer(0, lengths.run), interior = random.Integer(1, lengths.interior);
    parts.push_back({false, at, at + run, at});
    at += run;
    parts.push_back({true, at, at + interior, at - random.Integer(0, run)});
    at += interior;
  }
  const int64_t run = random.Integer(0, lengths.last_run);
  parts.push_back({false, at, at + run, at});
  tokens = isolated = RandomTokens(random, layer, at + run);
  Turn(shape, tokens, 0, tokens.count, start);
  Runner reference(Reference());
  for (const Part& part : parts) {
    Turn(shape, isolated, part.begin, part.end, part.begin - part.segment);
    if (!part.interior) continue;
    tuples.push_back(Capture(reference, shape, isolated.View(part.begin, part.end)));
    tuples.back().position = start + part.segment;
  }
}

std::vector<SeamStep> Prompt::Steps(std::span<const TupleView> views) const {
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
                           .state = state.View(),
                           .out = out.data(),
                           .out_stride = int64_t{prompt.shape.heads} * prompt.shape.d_v});
}

}  // namespace ashlar::kernels::testing
