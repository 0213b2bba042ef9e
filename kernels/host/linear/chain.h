// SPDX-License-Identifier: Apache-2.0
// Chain: the arguments that Compose, ComposeTransitions, Capture and AdvanceSeam have in common.
#pragma once

#include <span>

#include "kernels/kernels.h"

namespace ashlar::kernels::host {

// Columns of X = [S | T], or of S alone, processed through cached interiors and computed runs.
struct Chain {
  LinearShape shape;
  std::span<const TupleView> interiors;  // applied first
  std::span<const SeamStep> steps;       // applied after the interiors
  TokenInputs inputs;
  bool resume = false;                // start from `state`; else from S = 0, T = I
  StateView state;                    // out
  void* const* transition = nullptr;  // out; null: T is not wanted
  DType transition_dtype = DType::kF32;
  float* out = nullptr;  // the tokens' outputs; null: not wanted
  int64_t out_stride = 0;

  TransitionForm form() const { return NaturalForm(shape.family); }
  // Returns whether the caller wants T and T is a matrix: then X has columns for it.
  bool has_transition_columns() const { return transition != nullptr && form() == TransitionForm::kDense; }
};

}  // namespace ashlar::kernels::host
