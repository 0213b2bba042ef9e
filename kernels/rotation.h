// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding, as far as the cache needs it: rotating keys and queries.
#pragma once

#include <cstdint>

#include "tensor/types.h"

namespace ashlar::kernels {

// Rotation of the first `rotary_dim` of each head's dimensions. Pair i turns by position × frequencies[i]; half-split
// pairs dimension i with i + rotary_dim / 2, interleaved pairs 2i with 2i + 1. Angles are formed in fp64: in fp32 they
// are wrong by 0.03 rad at position one million.
struct Rotation {
  RopeStyle style = RopeStyle::kNone;
  int32_t rotary_dim = 0;               // even, ≤ kMaxRotaryDim
  const double* frequencies = nullptr;  // [rotary_dim / 2]
  // YaRN's factor on rotated dimensions. Applied when attention rotates an unrotated key or query to its position, once
  // per side; never when a key that is already rotated is rotated further.
  float scale = 1;
};
inline constexpr int32_t kMaxRotaryDim = 1024;

}  // namespace ashlar::kernels
