#include "examples/rag/staging.h"

#include <algorithm>

namespace ashlar::rag {
namespace {

using refengine::ModelConfig;
using refengine::PagePool;

size_t Align(size_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// Of one linear layer.
struct TupleBytes {
  explicit TupleBytes(const ModelConfig& config) {
    const auto& linear = config.linear;
    transition = Align(sizeof(float) * linear.value_heads * linear.transition_floats());
    state = Align(sizeof(float) * linear.value_heads * linear.state_floats());
    conv_tail = Align(sizeof(float) * (linear.conv_kernel - 1) * linear.conv_channels());
  }
  size_t total() const { return transition + state + conv_tail; }
  size_t transition, state, conv_tail;
};

}  // namespace

size_t RegionBytes(const ModelConfig& config, int32_t page_tokens, int32_t pages, size_t tuples) {
  return Align(PagePool::RequiredBytes(config, page_tokens, pages)) +
         tuples * TupleBytes(config).total() * config.linear_layers();
}

PagedCache DeclaredPages(const ModelConfig& config, const PagePool& pool) {
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

Staging::Staging(const ModelConfig& config, const PagePool& pool, const Region& region, size_t tuple) {
  const TupleBytes bytes(config);
  std::byte* at = region.data() + RegionBytes(config, pool.page_tokens(), pool.pages(), tuple);
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    layers_.push_back(static_cast<uint32_t>(layer));
    buffers_.push_back({.transition = reinterpret_cast<float*>(at),
                        .state = reinterpret_cast<float*>(at + bytes.transition),
                        .conv_tail = reinterpret_cast<float*>(at + bytes.transition + bytes.state)});
    at += bytes.total();
  }
}

void Staging::Take(const refengine::RecurrentState& state) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    std::ranges::copy(state.State(static_cast<int32_t>(i)), buffers_[i].state);
    std::ranges::copy(state.ConvWindow(static_cast<int32_t>(i)), buffers_[i].conv_tail);
  }
}

std::vector<PublishParts::Linear> Staging::Parts() const {
  std::vector<PublishParts::Linear> parts;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    parts.push_back({.layer = layers_[i],
                     .state = reinterpret_cast<const std::byte*>(buffers_[i].state),
                     .conv_tail = reinterpret_cast<const std::byte*>(buffers_[i].conv_tail)});
  }
  return parts;
}

}  // namespace ashlar::rag
