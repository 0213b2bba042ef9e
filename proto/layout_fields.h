// SPDX-License-Identifier: Apache-2.0
// Lists every field of Identity and Layout once, in the order of the canonical encoding. A coder is called with the
// name and value of each field. Enter tells the coder the prefix of the names of the following fields.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "proto/layout.h"

namespace ashlar {

inline constexpr uint8_t kAttentionTag = 1;
inline constexpr uint8_t kLinearTag = 2;
inline constexpr uint8_t kOpaqueTag = 3;

inline constexpr uint32_t kIdentityVersion = 1;
// A layout is encoded in the lowest version that can express it, so that existing layouts keep their bytes and
// namespaces. Version 2 adds the order of convolution tails, version 3 opaque layers.
inline constexpr uint32_t kLayoutVersionMin = 1, kLayoutVersionMax = 3;
inline uint32_t LayoutVersion(const Layout& layout) {
  if (std::ranges::any_of(layout.layers, [](const Layer& layer) { return std::holds_alternative<OpaqueLayer>(layer); }))
    return 3;
  const bool has_own_tails = std::ranges::any_of(layout.layers, [](const Layer& layer) {
    const auto* const linear = std::get_if<LinearLayer>(&layer);
    return linear != nullptr && (linear->conv_dtype.has_value() || linear->conv_order != TailOrder::kTokenFirst);
  });
  return has_own_tails ? 2 : 1;
}
// Encodes the layout in a version that can express it, for comparison with another encoding of that version.
std::string EncodeLayoutAs(uint32_t version, const Layout& layout);

template <typename Coder, typename R>
void CodeRope(Coder& code, R& rope) {
  code("rope.kind", rope.kind);
  code("rope.rotary_dim", rope.rotary_dim);
  code("rope.scale", rope.scale);
  code("rope.frequencies", rope.frequencies);
}

template <typename Coder, typename L>
void CodeAttention(Coder& code, L& layer) {
  code("kind", layer.kind);
  code("kv_heads", layer.kv_heads);
  code("key_dim", layer.key_dim);
  code("value_dim", layer.value_dim);
  code("dtype", layer.dtype);
  code("scales", layer.scales);
  CodeRope(code, layer.rope);
  code("stored", layer.stored);
}

template <typename Coder, typename L>
void CodeLinear(Coder& code, L& layer, uint32_t version) {
  code("family", layer.family);
  code("key_heads", layer.key_heads);
  code("value_heads", layer.value_heads);
  code("d_k", layer.d_k);
  code("d_v", layer.d_v);
  code("decay_table", layer.decay_table);
  code("state_dtype", layer.state_dtype);
  code("transition", layer.transition);
  code("order", layer.order);
  code("conv_channels", layer.conv_channels);
  code("conv_kernel", layer.conv_kernel);
  CodeRope(code, layer.rope);
  if (version < 2) return;
  code("conv_dtype", layer.conv_dtype);
  code("conv_order", layer.conv_order);
}

template <typename Coder, typename L>
void CodeOpaque(Coder& code, L& layer) {
  code("token_bytes", layer.token_bytes);
  code("state_bytes", layer.state_bytes);
}

template <typename Coder, typename L>
void CodeSeams(Coder& code, L& layout) {
  code("page_tokens", layout.page_tokens);
  code("head", layout.head);
  code("tail", layout.tail);
}

template <typename Coder, typename I>
void CodeIdentity(Coder& code, I& identity) {
  code("model_id", identity.model_id);
  code("weights_digest", identity.weights_digest);
  code("dtype", identity.dtype);
  code("quantization", identity.quantization);
  code("tokenizer_digest", identity.tokenizer_digest);
  code("lora", identity.lora);
}

// For coders that do not modify the layout.
template <typename Coder>
void CodeLayout(Coder& code, const Layout& layout, uint32_t version) {
  CodeSeams(code, layout);
  code("layers", static_cast<uint32_t>(layout.layers.size()));
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    code.Enter(absl::StrCat("layout.layers[", i, "]"));
    if (const auto* linear = std::get_if<LinearLayer>(&layout.layers[i])) {
      code("type", kLinearTag);
      CodeLinear(code, *linear, version);
    } else if (const auto* opaque = std::get_if<OpaqueLayer>(&layout.layers[i])) {
      code("type", kOpaqueTag);
      CodeOpaque(code, *opaque);
    } else {
      code("type", kAttentionTag);
      CodeAttention(code, std::get<AttentionLayer>(layout.layers[i]));
    }
  }
}

}  // namespace ashlar
