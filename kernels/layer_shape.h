// SPDX-License-Identifier: Apache-2.0
// Converts a layer that an engine has declared (tensor/layer.h) to the kernels' form. Tables and frequencies stay the
// layer's: the layer must outlive the result.
#pragma once

#include <cstdint>

#include "kernels/linear.h"
#include "kernels/rotation.h"
#include "tensor/layer.h"

namespace ashlar::kernels {

// The rotation without YaRN's factor: turning keys from one position to another does not apply it.
inline Rotation RotationOf(const Rope& rope) {
  return {
      .style = rope.kind, .rotary_dim = static_cast<int32_t>(rope.rotary_dim), .frequencies = rope.frequencies.data()};
}

inline LinearShape ShapeOf(const LinearLayer& layer) {
  return {.family = layer.family,
          .heads = static_cast<int32_t>(layer.value_heads),
          .key_heads = static_cast<int32_t>(layer.key_heads),
          .d_k = static_cast<int32_t>(layer.d_k),
          .d_v = static_cast<int32_t>(layer.d_v),
          .order = layer.order,
          .decay_table = layer.decay_table.empty() ? nullptr : layer.decay_table.data(),
          .rotation = RotationOf(layer.rope)};
}

}  // namespace ashlar::kernels
