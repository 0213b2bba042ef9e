// SPDX-License-Identifier: Apache-2.0
// One row of keys or values, and its rotation in fp64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/rows.h"

namespace ashlar::kernels::reference {

// The address of a row, and of its scale if it has one.
struct Row {
  std::byte* data;
  float* scale;
};

// Row `row` of dense rows; row of this position and head in pages.
Row RowAt(DType dtype, const void* data, const float* scales, int64_t row, int32_t dim);
Row RowAt(const PagedSlots& slots, int64_t position, int32_t head);

// key ← R(delta) key, whatever rotation.scale.
void Turn(const Rotation& rotation, int64_t delta, double* key);

}  // namespace ashlar::kernels::reference
