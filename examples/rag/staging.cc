// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/staging.h"

#include <algorithm>

namespace ashlar::rag {
using refengine::KvPages;
using refengine::ModelConfig;

std::vector<engine::PagePlace> PlacesOf(const ModelConfig& config, int32_t page_tokens, int32_t pages) {
  std::vector<engine::PagePlace> places;
  for (int32_t i = 0; i < config.attention_layers(); ++i) {
    const refengine::PagedLayerGeometry layer = KvPages::Geometry(config, page_tokens, pages, i);
    places.push_back({.layer = layer.layer,
                      .key_offset = layer.key_offset,
                      .value_offset = layer.value_offset,
                      .page_stride = layer.page_stride,
                      .token_stride = layer.token_stride,
                      .key_head_stride = layer.head_stride,
                      .value_head_stride = layer.head_stride});
  }
  return places;
}

std::vector<engine::LinearTensors> TensorsOf(const ModelConfig& config, const refengine::RecurrentState& state) {
  std::vector<engine::LinearTensors> tensors;
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    const int32_t linear = config.kind_index(layer);
    tensors.push_back({.layer = static_cast<uint32_t>(layer),
                       .state = state.State(linear).data(),
                       .conv_tail = state.ConvWindow(linear).data()});
  }
  return tensors;
}

bool ReadLayer(engine::Request& request, const ModelConfig& config, int32_t layer, std::vector<StepTuples>& steps) {
  if (!request.WaitLayer(static_cast<uint32_t>(layer)).ok()) return false;
  if (config.is_attention(layer)) return true;
  const engine::Plan& plan = request.plan();
  for (uint32_t i = 0; i < plan.step_count; ++i) {
    if (plan.steps[i].kind == engine::StepKind::kCompute) continue;
    engine::Tuple tuple;
    if (!request.StepTuple(i, static_cast<uint32_t>(layer), &tuple).ok()) return false;
    std::vector<kernels::HeadTuple>& heads = steps[i].heads[static_cast<size_t>(layer)];
    heads.clear();
    for (uint32_t h = 0; h < tuple.head_count; ++h) {
      const engine::Head& head = tuple.heads[h];
      heads.push_back({head.form, head.rank, head.transition, head.state, head.state_exponent});
    }
    steps[i].layers[static_cast<size_t>(layer)] = {
        .tuple = {heads.data(), tuple.transition_dtype, tuple.state_dtype, static_cast<int64_t>(tuple.position)},
        .conv_tail = static_cast<const float*>(tuple.conv_tail)};
  }
  return true;
}

TupleMemory::TupleMemory(const ModelConfig& config) {
  const refengine::LinearConfig& linear = config.linear;
  const auto take = [this](int64_t floats) { return memory_.emplace_back(static_cast<size_t>(floats)).data(); };
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    layers_.push_back(static_cast<uint32_t>(layer));
    buffers_.push_back({.transition = take(linear.value_heads * linear.transition_floats()),
                        .state = take(linear.value_heads * linear.state_floats()),
                        .conv_tail = take(int64_t{linear.conv_kernel - 1} * linear.conv_channels())});
  }
}

std::vector<engine::LinearTensors> TupleMemory::Tensors() const {
  std::vector<engine::LinearTensors> tensors;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const refengine::TupleBuffers& from = buffers_[i];
    tensors.push_back({layers_[i], from.state, nullptr, from.conv_tail, from.transition});
  }
  return tensors;
}

}  // namespace ashlar::rag
