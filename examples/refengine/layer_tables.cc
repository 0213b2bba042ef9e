// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/layer_tables.h"

#include <algorithm>

namespace ashlar::refengine {

LayerTables::LayerTables(const ModelConfig& config) : heads_(config.layers()), layers_(config.layers()) {
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    heads_[layer].resize(config.linear.value_heads);
    layers_[layer].tuple.heads = heads_[layer].data();
  }
}

LayerTables::LayerTables(const ModelConfig& config, std::span<const CachedLayer> layers) : LayerTables(config) {
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    std::copy_n(layers[layer].tuple.heads, heads_[layer].size(), heads_[layer].begin());
    layers_[layer] = layers[layer];
    if (!heads_[layer].empty()) layers_[layer].tuple.heads = heads_[layer].data();
  }
}

void LayerTables::StandAt(int64_t start) {
  for (CachedLayer& layer : layers_) layer.tuple.position = start;
}

void PointAt(const LinearConfig& linear, const float* transitions, const float* states,
             std::span<kernels::HeadTuple> heads) {
  for (size_t head = 0; head < heads.size(); ++head) {
    heads[head] = {.form = TransitionForm::kZero, .state = states + head * linear.state_floats()};
    if (transitions == nullptr) continue;
    heads[head].form = linear.form();
    heads[head].transition = transitions + head * linear.transition_floats();
  }
}

}  // namespace ashlar::refengine
