// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/config.h"

namespace ashlar::refengine {

ModelConfig DemoConfig(uint64_t seed, Family family) {
  ModelConfig config;
  config.d_model = 512;
  config.blocks = 2;
  config.mlp_dim = 1408;
  config.linear = {.family = family, .key_heads = 4, .value_heads = 8, .d_k = 64, .d_v = 128};
  if (family == Family::kLightning) config.linear.rotary_dim = 32;
  config.attention = {.query_heads = 8, .kv_heads = 2, .head_dim = 64, .rotary_dim = 16};
  config.tied_head = false;
  config.seed = seed;
  return config;
}

ModelConfig TinyConfig(uint64_t seed, int32_t blocks) {
  ModelConfig config;
  config.d_model = 40;
  config.blocks = blocks;
  config.mlp_dim = 72;
  config.linear = {.key_heads = 2, .value_heads = 4, .d_k = 12, .d_v = 20};
  config.attention = {.query_heads = 4, .kv_heads = 2, .head_dim = 16, .rotary_dim = 8};
  config.seed = seed;
  return config;
}

ModelConfig TinyLightningConfig(uint64_t seed, int32_t blocks) {
  ModelConfig config = TinyConfig(seed, blocks);
  config.linear.family = Family::kLightning;
  config.linear.rotary_dim = 10;
  return config;
}

}  // namespace ashlar::refengine
