// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/staging.h"

#include <algorithm>

namespace ashlar::rag {
using refengine::KvPages;
using refengine::ModelConfig;

size_t RegionBytes(const ModelConfig& config, int32_t page_tokens, int32_t pages) {
  return KvPages::RequiredBytes(config, page_tokens, pages);
}

PagedCache DeclaredPages(const ModelConfig& config, const KvPages& pool) {
  PagedCache pages{.page_tokens = static_cast<uint32_t>(pool.page_tokens()),
                   .pages = static_cast<uint32_t>(pool.pages())};
  for (int32_t i = 0; i < config.attention_layers(); ++i) {
    const refengine::PagedLayerGeometry layer = pool.Geometry(i);
    pages.layers.push_back({.layer = layer.layer,
                            .key_offset = layer.key_offset,
                            .value_offset = layer.value_offset,
                            .page_stride = layer.page_stride,
                            .token_stride = layer.token_stride,
                            .key_head_stride = layer.head_stride,
                            .value_head_stride = layer.head_stride});
  }
  return pages;
}

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

TupleRoom::TupleRoom(const ModelConfig& config) {
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

std::vector<engine::LinearTensors> TupleRoom::Tensors() const {
  std::vector<engine::LinearTensors> tensors;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const refengine::TupleBuffers& from = buffers_[i];
    tensors.push_back({layers_[i], from.state, nullptr, from.conv_tail, from.transition});
  }
  return tensors;
}

}  // namespace ashlar::rag
