// SPDX-License-Identifier: Apache-2.0
#include "kernels/reference/recurrence.h"

#include <algorithm>
#include <cmath>

namespace ashlar::kernels::reference {

Matrix ReadMatrix(StateOrder order, DType dtype, const void* from, int32_t rows, int32_t columns, int exponent) {
  Matrix out(rows, columns);
  for (int32_t i = 0; i < rows; ++i) {
    for (int32_t j = 0; j < columns; ++j) {
      const int64_t index = order == StateOrder::kKeyFirst ? int64_t{i} * columns + j : int64_t{j} * rows + i;
      out(i, j) = std::ldexp(static_cast<double>(ReadElement(dtype, from, index)), exponent);
    }
  }
  return out;
}

void WriteMatrix(const Matrix& matrix, StateOrder order, DType dtype, void* to, int exponent) {
  for (int32_t i = 0; i < matrix.rows; ++i) {
    for (int32_t j = 0; j < matrix.columns; ++j) {
      const int64_t index =
          order == StateOrder::kKeyFirst ? int64_t{i} * matrix.columns + j : int64_t{j} * matrix.rows + i;
      WriteElement(dtype, to, index, static_cast<float>(std::ldexp(matrix(i, j), -exponent)));
    }
  }
}

void WriteState(const Matrix& state, StateOrder order, DType dtype, void* to, int32_t* exponent) {
  int e = 0;
  if (dtype == DType::kF16) {
    double largest = 0;
    for (double value : state.values) largest = std::max(largest, std::fabs(value));
    while (std::isfinite(largest) && largest > std::ldexp(1.0, e + 15)) ++e;
    *exponent = e;
  }
  WriteMatrix(state, order, dtype, to, e);
}

Matrix ReadState(const LinearShape& shape, const StateView& state, int32_t h) {
  return ReadMatrix(shape.order, state.dtype, state.heads[h], shape.d_k, shape.d_v,
                    state.exponents == nullptr ? 0 : state.exponents[h]);
}

void WriteState(const LinearShape& shape, const Matrix& state, int32_t h, const StateView& to) {
  WriteState(state, shape.order, to.dtype, to.heads[h], to.exponents == nullptr ? nullptr : to.exponents + h);
}

Token::Token(const LinearShape& shape, const TokenInputs& in, int64_t t, int32_t h) {
  const int64_t key_head = h / (shape.heads / shape.key_heads);
  if (in.q != nullptr) q = in.q + t * in.q_stride + key_head * shape.d_k;
  k = in.k + t * in.k_stride + key_head * shape.d_k;
  v = in.v + t * in.v_stride + int64_t{h} * shape.d_v;
  if (in.g != nullptr) g = in.g + t * in.g_stride + int64_t{h} * GateWidth(shape);
  if (in.beta != nullptr) beta = in.beta + t * in.beta_stride + int64_t{h} * BetaWidth(shape);
}

double LogDecay(const LinearShape& shape, const Token& token, int32_t h, int32_t i, int32_t j) {
  switch (shape.family) {
    case Family::kRetnet:
    case Family::kLightning:
      return shape.decay_table[h];
    case Family::kMamba2:
      return double{shape.decay_table[h]} * token.beta[0];
    case Family::kMamba1:
      return double{shape.decay_table[(int64_t{h} * shape.d_k + i) * shape.d_v + j]} * token.beta[j];
    case Family::kGla:
    case Family::kKda:
      return token.g[i];
    case Family::kGdn:
      return token.g[0];
    case Family::kDeltanet:
      return 0;
  }
  return 0;
}

void Advance(const LinearShape& shape, const Token& token, int32_t h, const float* v, Matrix& x, double* writes) {
  const bool by_element = shape.family == Family::kMamba1;
  std::vector<double> row_decay(x.rows);
  for (int32_t i = 0; i < x.rows && !by_element; ++i) row_decay[i] = std::exp(LogDecay(shape, token, h, i, 0));
  for (int32_t j = 0; j < x.columns; ++j) {
    double read = 0;
    for (int32_t i = 0; i < x.rows; ++i) {
      x(i, j) *= by_element ? std::exp(LogDecay(shape, token, h, i, j)) : row_decay[i];
      read += double{token.k[i]} * x(i, j);
    }
    double write = v == nullptr ? 0.0 : v[j];
    if (Erases(shape.family)) write -= read;
    if (BetaWidth(shape) > 0) write *= token.beta[BetaWidth(shape) == 1 ? 0 : j];
    for (int32_t i = 0; i < x.rows; ++i) x(i, j) += token.k[i] * write;
    if (writes != nullptr) writes[j] = write;
  }
}

void ReadOut(const Matrix& state, const float* q, float* out) {
  for (int32_t j = 0; j < state.columns; ++j) {
    double sum = 0;
    for (int32_t i = 0; i < state.rows; ++i) sum += q[i] * state(i, j);
    out[j] = static_cast<float>(sum);
  }
}

}  // namespace ashlar::kernels::reference
