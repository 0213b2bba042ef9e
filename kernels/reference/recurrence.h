// SPDX-License-Identifier: Apache-2.0
// The common parts of the reference's operations on linear layers: matrices in fp64, tokens, one step of the
// recurrence.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/linear.h"

namespace ashlar::kernels::reference {

// A matrix [rows, columns], fp64.
struct Matrix {
  Matrix(int32_t its_rows, int32_t its_columns)
      : rows(its_rows), columns(its_columns), values(static_cast<size_t>(its_rows) * its_columns) {}
  double& operator()(int32_t i, int32_t j) { return values[static_cast<size_t>(i) * columns + j]; }
  double operator()(int32_t i, int32_t j) const { return values[static_cast<size_t>(i) * columns + j]; }

  int32_t rows, columns;
  std::vector<double> values;
};

// A matrix of the caller's, k-first [rows, columns] or transposed; its numbers × 2^exponent.
Matrix ReadMatrix(StateOrder order, DType dtype, const void* from, int32_t rows, int32_t columns, int exponent = 0);
void WriteMatrix(const Matrix& matrix, StateOrder order, DType dtype, void* to, int exponent = 0);

// Writes a state, and for fp16 its exponent: the smallest e ≥ 0 with max|S| ≤ 2^(e + 15).
void WriteState(const Matrix& state, StateOrder order, DType dtype, void* to, int32_t* exponent);

// Head h of a running state.
Matrix ReadState(const LinearShape& shape, const StateView& state, int32_t h);
void WriteState(const LinearShape& shape, const Matrix& state, int32_t h, const StateView& to);

// One token from the view of one head.
struct Token {
  Token(const LinearShape& shape, const TokenInputs& in, int64_t t, int32_t h);

  const float *q = nullptr, *k, *v, *g = nullptr, *beta = nullptr;
};

// Log decay of element (i, j) by one token.
double LogDecay(const LinearShape& shape, const Token& token, int32_t h, int32_t i, int32_t j);

// X ← T_t X + u_t for columns of a state; v null: u = 0, for columns of a transition. `writes`, if given: [columns],
// the values that the token writes at its key.
void Advance(const LinearShape& shape, const Token& token, int32_t h, const float* v, Matrix& x,
             double* writes = nullptr);

// out[j] = (Sᵀ q)[j], rounded once.
void ReadOut(const Matrix& state, const float* q, float* out);

}  // namespace ashlar::kernels::reference
