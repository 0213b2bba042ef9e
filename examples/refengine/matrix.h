// SPDX-License-Identifier: Apache-2.0
// Matrix products. Only this file uses OpenBLAS, with one thread; the work is split over our own threads, so that every
// way of computing uses the same workers and no other threads spin.
#pragma once

#include <cstdint>

#include "kernels/device.h"

namespace ashlar::refengine {

// C = scale × A B (+ C), fp32, row-major; leading dimensions in floats.
struct MatMulArgs {
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;  // [m, k]
  int64_t a_stride = 0;
  const float* b = nullptr;  // [k, n], or [n, k] when transposed
  int64_t b_stride = 0;
  bool b_transposed = false;
  float* c = nullptr;  // [m, n]
  int64_t c_stride = 0;
  float scale = 1;
  bool accumulate = false;
};

// On the calling thread; may be called from several threads at once.
void MatMul(const MatMulArgs& args);

// On all workers, split along the longer side of C.
void MatMul(const MatMulArgs& args, kernels::Workers& workers);

}  // namespace ashlar::refengine
