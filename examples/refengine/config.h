// SPDX-License-Identifier: Apache-2.0
// The shape of a reference model: [linear × 3, full attention] × blocks, a SwiGLU MLP after every mixer.
#pragma once

#include <cstdint>

#include "kernels/linear.h"

namespace ashlar::refengine {

// Gated delta net, as in Qwen3-Next: value head h reads key head h / (value_heads / key_heads). Or lightning
// attention's recurrence instead: a fixed decay per head, no erasing, queries and keys rotated by RoPE inside the
// layer.
struct LinearConfig {
  Family family = Family::kGdn;  // kGdn or kLightning
  int32_t key_heads = 0;
  int32_t value_heads = 0;  // a multiple of key_heads
  int32_t d_k = 0;
  int32_t d_v = 0;
  int32_t conv_kernel = 4;  // width of the causal depthwise convolution over q, k and v
  int32_t rotary_dim = 0;   // lightning: even, ≤ d_k, half-split; gdn: 0
  double rope_base = 1e4;   // see AttentionConfig::rope_base

  int32_t key_channels() const { return key_heads * d_k; }
  int32_t value_channels() const { return value_heads * d_v; }
  // Channels of the convolution, in this order: q, k, v.
  int32_t conv_channels() const { return 2 * key_channels() + value_channels(); }
  // Channels of b and a, from which gdn's β and decay are made.
  int32_t gate_channels() const { return family == Family::kGdn ? 2 * value_heads : 0; }
  // Columns of the input projection: q, k, v, output gate z, b, a.
  int32_t columns() const { return conv_channels() + value_channels() + gate_channels(); }
  TransitionForm form() const { return NaturalForm(family); }
  int64_t transition_floats() const {  // floats per head
    return form() == TransitionForm::kDense ? int64_t{d_k} * d_k : 1;
  }
  int64_t state_floats() const { return int64_t{d_k} * d_v; }
};

// Grouped-query attention with normalised queries and keys, partial half-split RoPE and a sigmoid output gate.
struct AttentionConfig {
  int32_t query_heads = 0;  // a multiple of kv_heads
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t rotary_dim = 0;  // even, ≤ head_dim; 0: no rotation
  double rope_base = 1e6;  // pair i rotates by rope_base^(−2i / rotary_dim) per position
};

struct ModelConfig {
  int32_t d_model = 0;
  int32_t blocks = 0;  // a block has three linear layers and one full-attention layer
  int32_t mlp_dim = 0;
  LinearConfig linear;
  AttentionConfig attention;
  bool tied_head = true;  // logits from the embedding's transpose
  float norm_epsilon = 1e-6f;
  uint64_t seed = 1;  // seed of all weights

  static constexpr int32_t kLayersPerBlock = 4;
  int32_t layers() const { return blocks * kLayersPerBlock; }
  int32_t linear_layers() const { return blocks * (kLayersPerBlock - 1); }
  int32_t attention_layers() const { return blocks; }
  bool is_attention(int32_t layer) const { return layer % kLayersPerBlock == kLayersPerBlock - 1; }
  // Index of a layer among the layers of its kind.
  int32_t kind_index(int32_t layer) const {
    return is_attention(layer) ? layer / kLayersPerBlock : layer - layer / kLayersPerBlock;
  }
};

// The demo's model: 8 layers, 32 million weights. `family`: gdn or lightning.
ModelConfig DemoConfig(uint64_t seed = 1, Family family = Family::kGdn);
// A model for tests: one or two blocks, every dimension different from every other.
ModelConfig TinyConfig(uint64_t seed, int32_t blocks = 1);
// The same with lightning's recurrence.
ModelConfig TinyLightningConfig(uint64_t seed, int32_t blocks = 1);

}  // namespace ashlar::refengine
