// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/engine_model.h"

#include <variant>

#include "examples/refengine/flops.h"

namespace ashlar::rag {
namespace {

engine::Rope RopeOf(const Rope& rope) {
  return {
      .style = rope.kind, .rotary_dim = rope.rotary_dim, .scale = rope.scale, .frequencies = rope.frequencies.data()};
}

engine::Layer LayerOf(const AttentionLayer& attention) {
  return {.kind = engine::LayerKind::kGqa,
          .rope = RopeOf(attention.rope),
          .kv_heads = attention.kv_heads,
          .key_dim = attention.key_dim,
          .value_dim = attention.value_dim};
}

engine::Layer LayerOf(const LinearLayer& linear) {
  return {.kind = engine::LayerKind::kLinear,
          .rope = RopeOf(linear.rope),
          .family = linear.family,
          .key_heads = linear.key_heads,
          .value_heads = linear.value_heads,
          .d_k = linear.d_k,
          .d_v = linear.d_v,
          .conv_channels = linear.conv_channels,
          .conv_kernel = linear.conv_kernel,
          .decay_table = linear.decay_table.empty() ? nullptr : linear.decay_table.data()};
}

}  // namespace

EngineModel::EngineModel(const refengine::Model& model, refengine::SeamWidths seams, int32_t page_tokens)
    : identity_(model.identity()),
      layout_(model.layout(static_cast<uint32_t>(seams.head), static_cast<uint32_t>(seams.tail),
                           static_cast<uint32_t>(page_tokens))) {
  for (const Layer& layer : layout_.layers) {
    const auto* const linear = std::get_if<LinearLayer>(&layer);
    layers_.push_back(linear != nullptr ? LayerOf(*linear) : LayerOf(std::get<AttentionLayer>(layer)));
  }
  // The operations of n tokens are a n + b n²: two prompts give a and b.
  constexpr int64_t kTokens = 1024;
  const double once = refengine::PrefillFlops(model.config(), kTokens).total();
  const double twice = refengine::PrefillFlops(model.config(), 2 * kTokens).total();
  const double square = (twice - 2 * once) / (2.0 * kTokens * kTokens);
  described_ = {.model_id = identity_.model_id.c_str(),
                .weights_digest = identity_.weights_digest.c_str(),
                .dtype = identity_.dtype.c_str(),
                .tokenizer_digest = identity_.tokenizer_digest.c_str(),
                .page_tokens = layout_.page_tokens,
                .head = layout_.head,
                .tail = layout_.tail,
                .layers = layers_.data(),
                .layer_count = static_cast<uint32_t>(layers_.size()),
                .flops_per_token = once / kTokens - square * kTokens,
                .flops_per_token_squared = square};
}

}  // namespace ashlar::rag
