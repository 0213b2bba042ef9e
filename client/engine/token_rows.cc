// SPDX-License-Identifier: Apache-2.0
#include "client/engine/token_rows.h"

#include <cmath>

namespace ashlar::engine {
namespace {

// Adds in four partial sums, which a compiler keeps in one register.
float SumOfSquares(const float* x, int32_t count) {
  float sums[4] = {};
  int32_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int32_t j = 0; j < 4; ++j) sums[j] += x[i + j] * x[i + j];
  }
  for (; i < count; ++i) sums[0] += x[i] * x[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void Copy(const kernels::LinearShape& shape, const TokenRows& given, const float*& rows, int64_t& stride, float scale,
          std::vector<float>& copy) {
  if (rows == nullptr) return;
  const int64_t width = int64_t{shape.key_heads} * shape.d_k;
  copy.resize(static_cast<size_t>(given.tokens) * static_cast<size_t>(width));
  for (uint64_t t = 0; t < given.tokens; ++t) {
    for (int32_t h = 0; h < shape.key_heads; ++h) {
      const float* const from = rows + static_cast<int64_t>(t) * stride + int64_t{h} * shape.d_k;
      float* const to = copy.data() + static_cast<int64_t>(t) * width + int64_t{h} * shape.d_k;
      const float factor =
          given.norm_epsilon > 0 ? scale / std::sqrt(SumOfSquares(from, shape.d_k) + given.norm_epsilon) : scale;
      for (int32_t i = 0; i < shape.d_k; ++i) to[i] = from[i] * factor;
    }
  }
  rows = copy.data();
  stride = width;
}

}  // namespace

RowWidths::RowWidths(const kernels::LinearShape& shape)
    : keys(int64_t{shape.key_heads} * shape.d_k),
      values(int64_t{shape.heads} * shape.d_v),
      gates(int64_t{shape.heads} * kernels::GateWidth(shape)),
      betas(int64_t{shape.heads} * kernels::BetaWidth(shape)) {}

ReadyRows::ReadyRows(const kernels::LinearShape& shape, const TokenRows& given) : rows_(given) {
  const RowWidths widths(shape);
  const auto set = [](int64_t& stride, int64_t width) { stride = stride == 0 ? width : stride; };
  set(rows_.q_stride, widths.keys);
  set(rows_.k_stride, widths.keys);
  set(rows_.v_stride, widths.values);
  set(rows_.g_stride, widths.gates);
  set(rows_.beta_stride, widths.betas);
  const float q_scale = given.q_scale == 0 ? 1 : given.q_scale;
  if (given.norm_epsilon > 0 || q_scale != 1) Copy(shape, given, rows_.q, rows_.q_stride, q_scale, q_);
  if (given.norm_epsilon > 0) Copy(shape, given, rows_.k, rows_.k_stride, 1, k_);
}

}  // namespace ashlar::engine
