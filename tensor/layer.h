// SPDX-License-Identifier: Apache-2.0
// The shape of one layer, and the constants of its recurrence, as an engine declares them. proto/layout.h validates and
// encodes them; kernels/layer_shape.h converts them to the form that kernels take.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tensor/types.h"

namespace ashlar {

// The type of opaque bytes in object headers and in pages: any type of one byte, because nothing converts them.
inline constexpr DType kOpaqueType = DType::kF8E4M3;

struct Rope {
  RopeStyle kind = RopeStyle::kNone;
  uint32_t rotary_dim = 0;          // even, at most the key dimension
  double scale = 1.0;               // YaRN's attention scale, applied once to queries and once to keys
  std::vector<double> frequencies;  // [rotary_dim / 2], radians per position, exactly as the engine uses them
  bool operator==(const Rope&) const = default;
};

struct AttentionLayer {
  AttentionKind kind = AttentionKind::kGqa;
  uint32_t kv_heads = 0;
  uint32_t key_dim = 0;    // gqa: key dimension; mla: latent dimension
  uint32_t value_dim = 0;  // gqa: value dimension; mla: dimension of the rotary key part
  DType dtype = DType::kF32;
  bool scales = false;  // fp8: one fp32 scale per token and head is stored
  Rope rope;
  StoredKeys stored = StoredKeys::kZeroBased;
  bool operator==(const AttentionLayer&) const = default;
};

struct LinearLayer {
  Family family = Family::kGdn;
  uint32_t key_heads = 0;
  uint32_t value_heads = 0;
  uint32_t d_k = 0;
  uint32_t d_v = 0;
  // Constants of the recurrence. retnet, lightning: the decay of each head, [value_heads]. mamba2: A of each head,
  // [value_heads]. mamba1: A, [value_heads, d_k, d_v]. Empty for other families.
  std::vector<float> decay_table;
  DType state_dtype = DType::kF32;
  TransitionForm transition = TransitionForm::kDense;
  StateOrder order = StateOrder::kKeyFirst;
  uint32_t conv_channels = 0;  // 0 without a short convolution
  uint32_t conv_kernel = 0;    // kernel width; the cached tail holds the inputs of conv_kernel − 1 tokens
  Rope rope;  // rotation of keys in the layer; only with scalar transitions, because R(p) commutes with no others
  // Type of the convolution's inputs in tails and spans if it differs from state_dtype; empty otherwise.
  std::optional<DType> conv_dtype;
  TailOrder conv_order = TailOrder::kTokenFirst;
  bool operator==(const LinearLayer&) const = default;
};

// A layer whose bytes are stored and landed unchanged. Only exact prefixes reuse it: nothing composes or rotates it.
// Both fields are sums over the tensor-parallel ranks; at least one is positive.
struct OpaqueLayer {
  uint32_t token_bytes = 0;  // bytes of one token in the engine's pages; 0: no pages
  uint64_t state_bytes = 0;  // bytes of the state after a token; 0: no state
  bool operator==(const OpaqueLayer&) const = default;
};

constexpr DType ConvType(const LinearLayer& layer) {
  return layer.conv_dtype.value_or(layer.state_dtype);
}
// Returns the bytes of a convolution tail; 0 without a convolution.
constexpr uint64_t ConvTailBytes(const LinearLayer& layer) {
  if (layer.conv_kernel == 0) return 0;
  return uint64_t{layer.conv_kernel - 1} * layer.conv_channels * ElementBytes(ConvType(layer));
}

}  // namespace ashlar
