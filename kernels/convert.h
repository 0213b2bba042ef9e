// SPDX-License-Identifier: Apache-2.0
// Conversion of fp32 arrays to another element type, rounded to nearest with ties to even, like WriteElement.
#pragma once

#include <cstdint>

#include "tensor/types.h"

namespace ashlar::kernels {

// Writes `count` numbers to `to`, an array of `dtype`. The arrays must not overlap.
void WriteElements(DType dtype, void* to, const float* from, uint64_t count);

}  // namespace ashlar::kernels
