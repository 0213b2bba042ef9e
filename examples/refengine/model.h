// SPDX-License-Identifier: Apache-2.0
// Model: a reference model's configuration and weights, and its declaration to the cache.
#pragma once

#include <cstdint>
#include <vector>

#include "examples/refengine/config.h"
#include "kernels/kernels.h"
#include "proto/layout.h"

namespace ashlar::refengine {

// Matrices are row-major [inputs, outputs]: y = x W.
struct LinearWeights {
  std::vector<float> input;  // [d_model, columns]: q, k, v, z, b, a
  std::vector<float> conv;   // [conv_kernel, conv_channels], oldest input first
  // gdn: g = −e^{a_log} softplus(a + dt_bias), [value_heads] each. lightning: the log decay of every token,
  // [value_heads].
  std::vector<float> a_log, dt_bias, log_decay;
  std::vector<float> out_norm;  // [d_v]
  std::vector<float> output;    // [value_channels, d_model]
};

struct AttentionWeights {
  std::vector<float> input;  // [d_model, 2 × query_heads × head_dim + 2 × kv_heads × head_dim]: q, output gate, k, v
  std::vector<float> q_norm;  // [head_dim]
  std::vector<float> k_norm;  // [head_dim]
  std::vector<float> output;  // [query_heads × head_dim, d_model]
};

struct LayerWeights {
  std::vector<float> mixer_norm;  // [d_model]
  LinearWeights linear;           // weights of linear layers
  AttentionWeights attention;     // weights of full-attention layers
  std::vector<float> mlp_norm;    // [d_model]
  std::vector<float> gate_up;     // [d_model, 2 × mlp_dim]
  std::vector<float> down;        // [mlp_dim, d_model]
};

struct Weights {
  std::vector<float> embedding;  // [vocabulary, d_model]
  std::vector<LayerWeights> layers;
  std::vector<float> final_norm;  // [d_model]
  std::vector<float> head;        // [vocabulary, d_model]; empty when tied
};

// Weights drawn from config.seed, the same on every machine. A third of the linear heads keep memory over hundreds of
// tokens (slow decay, keys that leave most directions alone); the rest decay as Qwen3-Next does at initialisation.
Weights DrawWeights(const ModelConfig& config);

class Model {
 public:
  // Aborts with the field's name where the configuration makes no sense.
  explicit Model(const ModelConfig& config);

  const ModelConfig& config() const { return config_; }
  const Weights& weights() const { return weights_; }
  const std::vector<float>& head() const { return config_.tied_head ? weights_.embedding : weights_.head; }
  // [rotary_dim / 2], radians per position.
  const std::vector<double>& frequencies() const { return frequencies_; }
  // The rotation of attention's keys with their position.
  kernels::Rotation rotation() const;
  // A linear layer's shape for the kernels; states are k-first.
  kernels::LinearShape linear_shape(int32_t layer) const;

  // The engine's declaration when it opens this model (docs/formats.md §1). Keys are stored zero-based.
  Identity identity() const;
  Layout layout(uint32_t head, uint32_t tail, uint32_t page_tokens) const;

 private:
  ModelConfig config_;
  Weights weights_;
  std::vector<double> frequencies_, linear_frequencies_;
};

}  // namespace ashlar::refengine
