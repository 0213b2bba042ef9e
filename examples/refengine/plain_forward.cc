// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/plain_forward.h"

#include <algorithm>
#include <cmath>

#include "examples/refengine/tokenizer.h"

namespace ashlar::refengine {
namespace {

using Vector = std::vector<double>;

double Sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
double Silu(double x) {
  return x * Sigmoid(x);
}

Vector Times(const Vector& x, const std::vector<float>& matrix) {
  const size_t columns = matrix.size() / x.size();
  Vector out(columns, 0.0);
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < columns; ++j) out[j] += x[i] * matrix[i * columns + j];
  }
  return out;
}

Vector Slice(const Vector& x, int64_t begin, int64_t count) {
  return Vector(x.begin() + begin, x.begin() + begin + count);
}

Vector Normalized(const Vector& x, const std::vector<float>& weight, double epsilon) {
  double square = 0;
  for (const double value : x) square += value * value;
  const double scale = 1 / std::sqrt(square / x.size() + epsilon);
  Vector out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * weight[i];
  return out;
}

Vector UnitLength(const Vector& x) {
  double square = 0;
  for (const double value : x) square += value * value;
  Vector out = x;
  for (double& value : out) value /= std::sqrt(square + 1e-6);
  return out;
}

void Add(Vector& x, const Vector& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// Half-split pairs i turn by position × base^(−2i / rotary_dim).
Vector Rotated(Vector x, int64_t position, int32_t rotary_dim, double base) {
  const int32_t half = rotary_dim / 2;
  for (int32_t i = 0; i < half; ++i) {
    const double angle = position * std::pow(base, -static_cast<double>(i) / half);
    const double first = x[i], second = x[half + i];
    x[i] = first * std::cos(angle) - second * std::sin(angle);
    x[half + i] = first * std::sin(angle) + second * std::cos(angle);
  }
  return x;
}

class PlainLinear {
 public:
  PlainLinear(const ModelConfig& config, const LinearWeights& weights)
      : config_(config),
        weights_(weights),
        state(int64_t{config.linear.value_heads} * config.linear.d_k * config.linear.d_v),
        window(int64_t{config.linear.conv_kernel - 1} * config.linear.conv_channels()) {}

  Vector Step(const Vector& x) {
    const LinearConfig& linear = config_.linear;
    const Vector projected = Times(x, weights_.input);
    const int64_t channels = linear.conv_channels(), values = linear.value_channels();
    const Vector mixed = Convolve(Slice(projected, 0, channels));
    const Vector z = Slice(projected, channels, values);
    Vector out;
    for (int32_t head = 0; head < linear.value_heads; ++head) {
      const int32_t key_head = head / (linear.value_heads / linear.key_heads);
      const Vector q = Turned(UnitLength(Slice(mixed, key_head * linear.d_k, linear.d_k)));
      const Vector k = Turned(UnitLength(Slice(mixed, linear.key_channels() + key_head * linear.d_k, linear.d_k)));
      const Vector v = Slice(mixed, 2 * linear.key_channels() + head * linear.d_v, linear.d_v);
      Vector o = linear.family == Family::kGdn
                     ? RecurGdn(head, q, k, v, Slice(projected, channels + values, linear.gate_channels()))
                     : Recur(head, q, k, v, std::exp(double{weights_.log_decay[head]}), 1, false);
      o = Normalized(o, weights_.out_norm, config_.norm_epsilon);
      for (int32_t i = 0; i < linear.d_v; ++i) out.push_back(o[i] * Silu(z[head * linear.d_v + i]));
    }
    ++position_;
    return Times(out, weights_.output);
  }

 private:
  Vector Turned(const Vector& x) const {
    return Rotated(x, position_, config_.linear.rotary_dim, config_.linear.rope_base);
  }

  Vector Convolve(const Vector& x) {
    const int64_t channels = x.size(), kernel = config_.linear.conv_kernel;
    window.insert(window.end(), x.begin(), x.end());
    Vector out(channels, 0.0);
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t j = 0; j < kernel; ++j) out[c] += weights_.conv[j * channels + c] * window[j * channels + c];
      out[c] = Silu(out[c]);
    }
    window.erase(window.begin(), window.begin() + channels);
    return out;
  }

  // `gates`: b, a.
  Vector RecurGdn(int32_t head, const Vector& q, const Vector& k, const Vector& v, const Vector& gates) {
    const double a = gates[config_.linear.value_heads + head] + weights_.dt_bias[head];
    const double g = -std::exp(double{weights_.a_log[head]}) * std::log1p(std::exp(a));
    return Recur(head, q, k, v, std::exp(g), Sigmoid(gates[head]), true);
  }

  // gdn, which erases: S ← e^g (S − β k (kᵀ S)) + β k vᵀ. lightning: S ← e^d S + k vᵀ. o = Sᵀ q d_k^{−1/2}.
  Vector Recur(int32_t head, const Vector& q, const Vector& k, const Vector& v, double decay, double beta,
               bool erases) {
    const int64_t d_k = config_.linear.d_k, d_v = config_.linear.d_v;
    double* s = state.data() + head * d_k * d_v;
    Vector out(d_v, 0.0);
    for (int64_t j = 0; j < d_v; ++j) {
      double seen = 0;
      for (int64_t i = 0; i < d_k && erases; ++i) seen += k[i] * decay * s[i * d_v + j];
      for (int64_t i = 0; i < d_k; ++i) {
        s[i * d_v + j] = decay * s[i * d_v + j] + beta * k[i] * (v[j] - seen);
        out[j] += q[i] * s[i * d_v + j] / std::sqrt(static_cast<double>(d_k));
      }
    }
    return out;
  }

  const ModelConfig& config_;
  const LinearWeights& weights_;
  int64_t position_ = 0;

 public:
  Vector state, window;
};

class PlainAttention {
 public:
  PlainAttention(const ModelConfig& config, const AttentionWeights& weights) : config_(config), weights_(weights) {}

  Vector Step(const Vector& x) {
    const AttentionConfig& attention = config_.attention;
    const Vector projected = Times(x, weights_.input);
    const int64_t dim = attention.head_dim, position = keys_.size();
    const int64_t query_dim = attention.query_heads * dim, kv_dim = attention.kv_heads * dim;
    Vector& key = keys_.emplace_back();
    for (int32_t head = 0; head < attention.kv_heads; ++head) {
      const Vector k =
          Turned(Normalized(Slice(projected, 2 * query_dim + head * dim, dim), weights_.k_norm, config_.norm_epsilon),
                 position);
      key.insert(key.end(), k.begin(), k.end());
    }
    values_.push_back(Slice(projected, 2 * query_dim + kv_dim, kv_dim));
    Vector out;
    for (int32_t head = 0; head < attention.query_heads; ++head) {
      const Vector q =
          Turned(Normalized(Slice(projected, head * dim, dim), weights_.q_norm, config_.norm_epsilon), position);
      const Vector o = Attend(q, head / (attention.query_heads / attention.kv_heads) * dim);
      for (int64_t i = 0; i < dim; ++i) out.push_back(o[i] * Sigmoid(projected[query_dim + head * dim + i]));
    }
    return Times(out, weights_.output);
  }

 private:
  Vector Turned(const Vector& x, int64_t position) const {
    return Rotated(x, position, config_.attention.rotary_dim, config_.attention.rope_base);
  }

  Vector Attend(const Vector& q, int64_t offset) const {
    const int64_t dim = q.size();
    Vector scores;
    for (const Vector& key : keys_) {
      double score = 0;
      for (int64_t i = 0; i < dim; ++i) score += q[i] * key[offset + i];
      scores.push_back(score / std::sqrt(static_cast<double>(dim)));
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    Vector out(dim, 0.0);
    for (size_t t = 0; t < scores.size(); ++t) {
      const double weight = std::exp(scores[t] - max);
      sum += weight;
      for (int64_t i = 0; i < dim; ++i) out[i] += weight * values_[t][offset + i];
    }
    for (double& value : out) value /= sum;
    return out;
  }

  const ModelConfig& config_;
  const AttentionWeights& weights_;
  std::vector<Vector> keys_, values_;  // [position][kv_heads × head_dim]
};

Vector SwiGlu(const Vector& x, const LayerWeights& weights) {
  const Vector gate_up = Times(x, weights.gate_up);
  const size_t inner = gate_up.size() / 2;
  Vector hidden(inner);
  for (size_t i = 0; i < inner; ++i) hidden[i] = Silu(gate_up[i]) * gate_up[inner + i];
  return Times(hidden, weights.down);
}

Vector Logits(const Model& model, const Vector& x) {
  const Vector normed = Normalized(x, model.weights().final_norm, model.config().norm_epsilon);
  Vector logits(kVocabulary, 0.0);
  for (int32_t token = 0; token < kVocabulary; ++token) {
    for (size_t i = 0; i < normed.size(); ++i) logits[token] += normed[i] * model.head()[token * normed.size() + i];
  }
  return logits;
}

}  // namespace

PlainResult PlainForward(const Model& model, std::span<const int32_t> tokens) {
  const ModelConfig& config = model.config();
  std::vector<PlainLinear> linear;
  std::vector<PlainAttention> attention;
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    const LayerWeights& weights = model.weights().layers[layer];
    if (config.is_attention(layer)) {
      attention.emplace_back(config, weights.attention);
    } else {
      linear.emplace_back(config, weights.linear);
    }
  }
  PlainResult result;
  for (const int32_t token : tokens) {
    const float* row = model.weights().embedding.data() + int64_t{token} * config.d_model;
    Vector x(row, row + config.d_model);
    for (int32_t layer = 0; layer < config.layers(); ++layer) {
      const LayerWeights& weights = model.weights().layers[layer];
      const Vector normed = Normalized(x, weights.mixer_norm, config.norm_epsilon);
      const int32_t index = config.kind_index(layer);
      Add(x, config.is_attention(layer) ? attention[index].Step(normed) : linear[index].Step(normed));
      Add(x, SwiGlu(Normalized(x, weights.mlp_norm, config.norm_epsilon), weights));
    }
    result.logits.push_back(Logits(model, x));
  }
  for (const PlainLinear& layer : linear) {
    result.states.push_back(layer.state);
    result.windows.push_back(layer.window);
  }
  return result;
}

}  // namespace ashlar::refengine
