// SPDX-License-Identifier: Apache-2.0
// LayerOf: layouts for the shapes that the kernels' tests draw.
#pragma once

#include <cstdint>

#include "kernels/linear.h"
#include "proto/layout.h"

namespace ashlar::storage {

// The layer that declares such a shape, without a convolution.
inline LinearLayer LayerOf(const kernels::LinearShape& shape, DType state) {
  LinearLayer layer{.family = shape.family,
                    .key_heads = static_cast<uint32_t>(shape.key_heads),
                    .value_heads = static_cast<uint32_t>(shape.heads),
                    .d_k = static_cast<uint32_t>(shape.d_k),
                    .d_v = static_cast<uint32_t>(shape.d_v),
                    .state_dtype = state,
                    .transition = NaturalForm(shape.family),
                    .order = shape.order};
  if (shape.decay_table != nullptr) {
    const int64_t numbers = shape.family == Family::kMamba1 ? int64_t{shape.d_k} * shape.d_v : 1;
    layer.decay_table.assign(shape.decay_table, shape.decay_table + shape.heads * numbers);
  }
  if (shape.rotation.style != RopeStyle::kNone) {
    layer.rope = {.kind = shape.rotation.style, .rotary_dim = static_cast<uint32_t>(shape.rotation.rotary_dim)};
    layer.rope.frequencies.assign(shape.rotation.frequencies,
                                  shape.rotation.frequencies + shape.rotation.rotary_dim / 2);
  }
  return layer;
}

}  // namespace ashlar::storage
