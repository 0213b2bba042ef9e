// SPDX-License-Identifier: Apache-2.0
// One layer's shape and the numbers that its mathematics needs besides tokens, as an engine declares it. proto/layout.h
// validates and encodes it; kernels/layer_shape.h converts it to the kernels' form.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tensor/types.h"

namespace ashlar {

struct Rope {
  RopeStyle kind = RopeStyle::kNone;
  uint32_t rotary_dim = 0;          // even, ≤ the key's dimension
  double scale = 1.0;               // YaRN's attention scale, applied once per side
  std::vector<double> frequencies;  // [rotary_dim / 2], radians per position; the engine's own numbers
  bool operator==(const Rope&) const = default;
};

struct AttentionLayer {
  AttentionKind kind = AttentionKind::kGqa;
  uint32_t kv_heads = 0;
  uint32_t key_dim = 0;    // gqa; mla: the latent's dimension
  uint32_t value_dim = 0;  // gqa; mla: the rotary key part's dimension
  DType dtype = DType::kF32;
  bool scales = false;  // fp8: one fp32 scale per token and head follows
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
  // Numbers a family needs besides its tokens. retnet, lightning: each head's decay, mamba2: each head's A, all
  // [value_heads]; mamba1: A, [value_heads, d_k, d_v]; the others: none.
  std::vector<float> decay_table;
  DType state_dtype = DType::kF32;
  TransitionForm transition = TransitionForm::kDense;
  StateOrder order = StateOrder::kKeyFirst;
  uint32_t conv_channels = 0;  // 0: no short convolution
  uint32_t conv_kernel = 0;    // its width; the cached tail holds conv_kernel − 1 tokens' inputs
  Rope rope;                   // on keys inside the layer; scalar transitions only: R(p) commutes with no others
  // Of the convolution's inputs, in tails and spans, where it is not state_dtype. No layout says state_dtype here.
  std::optional<DType> conv_dtype;
  TailOrder conv_order = TailOrder::kTokenFirst;
  bool operator==(const LinearLayer&) const = default;
};

constexpr DType ConvType(const LinearLayer& layer) {
  return layer.conv_dtype.value_or(layer.state_dtype);
}
// Bytes of a convolution's tail; 0 without convolution.
constexpr uint64_t ConvTailBytes(const LinearLayer& layer) {
  if (layer.conv_kernel == 0) return 0;
  return uint64_t{layer.conv_kernel - 1} * layer.conv_channels * ElementBytes(ConvType(layer));
}

}  // namespace ashlar
