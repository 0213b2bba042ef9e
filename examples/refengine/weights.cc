// SPDX-License-Identifier: Apache-2.0
// Weights for a model without training, with which it behaves like a trained one: activations near unit scale at every
// depth, attention that picks out a few keys, and linear heads of both kinds, erasure and remembering.
#include <algorithm>
#include <cmath>

#include "examples/refengine/model.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::refengine {
namespace {

// Root mean squares of the inputs of output projections, for unit-normal inputs: normalised output × SiLU(z), and
// SiLU(gate) × up. Dividing by them gives each sublayer's output its intended scale.
constexpr float kSiluRms = 0.6f;
// Attention averages over several keys and is halved by its gate.
constexpr float kAttentionRms = 0.25f;
// Each sublayer adds this much to a residual stream that starts at 1; attention half as much.
constexpr float kSublayerRms = 0.5f;
constexpr float kAttentionShare = 0.5f;
// The share of heads that remember; the others erase. Trained models mostly attend nearby: the error of a segment that
// is computed alone is concentrated at its ends (HYPIC §3.2). Without this share the error would be even over its
// tokens, and no seam would reduce it, however wide.
constexpr float kRememberingShare = 0.3f;
// q and k are normalised, so their norms' weights set the sharpness of attention: scores have deviation kSharpness².
constexpr float kSharpness = 1.0f;
constexpr float kLogitRms = 3.0f;

// SplitMix64: one stream per tensor, the same numbers on every machine.
class Stream {
 public:
  Stream(uint64_t seed, uint64_t tensor) : state_(seed * 0x9E3779B97F4A7C15u + tensor * 0xD1B54A32D192ED03u) { Next(); }

  // Uniform in [0, 1).
  float Uniform() { return static_cast<float>(Next() >> 40) * 0x1p-24f; }
  // Uniform with mean 0 and the given standard deviation.
  float Centred(float deviation) { return (2 * Uniform() - 1) * deviation * std::sqrt(3.0f); }

 private:
  uint64_t Next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t state_;
};

// Draws tensors one after another, each from a separate random stream.
class Draw {
 public:
  explicit Draw(uint64_t seed) : seed_(seed) {}

  Stream NextStream() { return Stream(seed_, ++tensor_); }

  std::vector<float> Centred(int64_t count, float deviation) {
    Stream stream = NextStream();
    std::vector<float> values(count);
    for (float& value : values) value = stream.Centred(deviation);
    return values;
  }

  // Norm weights: near 1, all different.
  std::vector<float> Norm(int64_t count, float mean = 1.0f) {
    std::vector<float> values = Centred(count, 0.1f * mean);
    for (float& value : values) value += mean;
    return values;
  }

 private:
  uint64_t seed_, tensor_ = 0;
};

// Heads that remember. Their state decays little over a thousand tokens, and their keys stay close to a few directions,
// so that an erase does not affect the others: the persistent subspace of trained delta-rule layers.
bool NarrowKeys(const LinearConfig& linear, int32_t key_head) {
  return key_head < (linear.key_heads + 1) / 2;
}
bool SlowDecay(const LinearConfig& linear, int32_t head) {
  return 8 * head < 3 * linear.value_heads;
}

// Makes the key columns of one head low-rank with a small remainder, and small, where SiLU is nearly linear and does
// not spread them again. Gives the head's channels one filter, which keeps the rank.
void NarrowKeyHead(const ModelConfig& config, int32_t key_head, Stream stream, LinearWeights& weights) {
  constexpr float kLowRank = 0.3f, kRest = 0.03f;  // deviations of the two parts before the convolution
  const LinearConfig& linear = config.linear;
  const int32_t rank = std::max(3, linear.d_k / 16);
  const int64_t columns = linear.columns();
  const int64_t first = linear.key_channels() + int64_t{key_head} * linear.d_k;
  std::vector<float> basis(int64_t{rank} * linear.d_k), coordinates(rank);
  for (float& value : basis) value = stream.Centred(kLowRank / std::sqrt(static_cast<float>(rank)));
  const float input_deviation = 1.0f / std::sqrt(static_cast<float>(config.d_model));
  for (int32_t row = 0; row < config.d_model; ++row) {
    for (float& value : coordinates) value = stream.Centred(input_deviation);
    for (int32_t i = 0; i < linear.d_k; ++i) {
      float value = stream.Centred(kRest * input_deviation);
      for (int32_t r = 0; r < rank; ++r) value += coordinates[r] * basis[r * linear.d_k + i];
      weights.input[row * columns + first + i] = value;
    }
  }
  for (int32_t j = 0; j < linear.conv_kernel; ++j) {
    float* taps = weights.conv.data() + int64_t{j} * linear.conv_channels() + first;
    std::fill(taps, taps + linear.d_k, taps[0]);
  }
}

// g = −e^{a_log} softplus(a + dt_bias). Remembering heads lose about a third over 500 tokens; the others are drawn as
// Mamba-2, FLA and Qwen3-Next do: e^{a_log} ~ U(1, 16), softplus(dt_bias) log-uniform in [1e-3, 0.1].
void DrawGates(const LinearConfig& linear, Draw& draw, LinearWeights& weights) {
  Stream stream = draw.NextStream();
  for (int32_t head = 0; head < linear.value_heads; ++head) {
    const float u = stream.Uniform(), w = stream.Uniform();
    if (linear.family == Family::kLightning) {
      // The same lengths of memory, the same for every token.
      weights.log_decay.push_back(SlowDecay(linear, head) ? -1e-3f * (0.5f + 0.3f * u) : -std::exp2(-7 * u));
      continue;
    }
    const float a = SlowDecay(linear, head) ? 0.5f + 0.3f * u : 1.0f + 15.0f * u;
    const float dt = SlowDecay(linear, head) ? 1e-3f : std::exp(std::log(1e-3f) + w * std::log(100.0f));
    weights.a_log.push_back(std::log(a));
    weights.dt_bias.push_back(std::log(std::expm1(dt)));
  }
}

LinearWeights DrawLinear(const ModelConfig& config, Draw& draw) {
  constexpr float kDecayInput = 0.5f;  // deviation of a: how much the token itself affects its decay
  const LinearConfig& linear = config.linear;
  const float input_deviation = 1.0f / std::sqrt(static_cast<float>(config.d_model));
  const int64_t columns = linear.columns();
  LinearWeights weights;
  weights.input = draw.Centred(columns * config.d_model, input_deviation);
  for (int32_t row = 0; row < config.d_model && linear.gate_channels() > 0; ++row) {
    float* a = weights.input.data() + (row + 1) * columns - linear.value_heads;
    for (int32_t head = 0; head < linear.value_heads; ++head) a[head] *= kDecayInput;
  }
  weights.conv = draw.Centred(int64_t{linear.conv_kernel} * linear.conv_channels(),
                              1.0f / std::sqrt(static_cast<float>(linear.conv_kernel)));
  for (int32_t key_head = 0; key_head < linear.key_heads; ++key_head) {
    if (NarrowKeys(linear, key_head)) NarrowKeyHead(config, key_head, draw.NextStream(), weights);
  }
  DrawGates(linear, draw, weights);
  weights.out_norm = draw.Norm(linear.d_v);
  weights.output = draw.Centred(int64_t{linear.value_channels()} * config.d_model,
                                kSublayerRms / kSiluRms / std::sqrt(static_cast<float>(linear.value_channels())));
  for (int32_t head = 0; head < linear.value_heads; ++head) {
    if (!SlowDecay(linear, head)) continue;
    float* rows = weights.output.data() + int64_t{head} * linear.d_v * config.d_model;
    for (int64_t i = 0; i < int64_t{linear.d_v} * config.d_model; ++i) rows[i] *= kRememberingShare;
  }
  return weights;
}

AttentionWeights DrawAttention(const ModelConfig& config, Draw& draw) {
  const AttentionConfig& attention = config.attention;
  const int64_t query_dim = int64_t{attention.query_heads} * attention.head_dim;
  const int64_t kv_dim = int64_t{attention.kv_heads} * attention.head_dim;
  AttentionWeights weights;
  weights.input =
      draw.Centred((2 * query_dim + 2 * kv_dim) * config.d_model, 1.0f / std::sqrt(static_cast<float>(config.d_model)));
  weights.q_norm = draw.Norm(attention.head_dim, kSharpness);
  weights.k_norm = draw.Norm(attention.head_dim, kSharpness);
  weights.output = draw.Centred(query_dim * config.d_model, kAttentionShare * kSublayerRms / kAttentionRms /
                                                                std::sqrt(static_cast<float>(query_dim)));
  return weights;
}

}  // namespace

Weights DrawWeights(const ModelConfig& config) {
  Draw draw(config.seed);
  const float input_deviation = 1.0f / std::sqrt(static_cast<float>(config.d_model));
  const int64_t vocabulary_floats = int64_t{kVocabulary} * config.d_model;
  Weights weights;
  // A tied embedding is also the head, which sets its scale; the first norm makes up for it.
  weights.embedding = draw.Centred(vocabulary_floats, config.tied_head ? kLogitRms * input_deviation : 1.0f);
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    LayerWeights& out = weights.layers.emplace_back();
    out.mixer_norm = draw.Norm(config.d_model);
    if (config.is_attention(layer)) {
      out.attention = DrawAttention(config, draw);
    } else {
      out.linear = DrawLinear(config, draw);
    }
    out.mlp_norm = draw.Norm(config.d_model);
    out.gate_up = draw.Centred(2 * int64_t{config.d_model} * config.mlp_dim, input_deviation);
    out.down = draw.Centred(int64_t{config.mlp_dim} * config.d_model,
                            kSublayerRms / kSiluRms / std::sqrt(static_cast<float>(config.mlp_dim)));
  }
  weights.final_norm = draw.Norm(config.d_model);
  if (!config.tied_head) weights.head = draw.Centred(vocabulary_floats, kLogitRms * input_deviation);
  return weights;
}

}  // namespace ashlar::refengine
