// SPDX-License-Identifier: Apache-2.0
// FindTuple: finds the tuple of a linear layer in an object. Daemon and engine both use it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/layout.h"
#include "proto/object.h"

namespace ashlar {

// The dimensions of a layer's tuple.
struct TupleShape {
  uint32_t heads = 0;
  uint32_t d_k = 0, d_v = 0;
  TransitionForm transition = TransitionForm::kDense;  // the natural form of the family
};
TupleShape TupleShapeOf(const LinearLayer& layer);

// Returns the bytes of one head's transition in a form, for a state type.
uint64_t TransitionBytes(const TupleShape& shape, DType state, TransitionForm form, uint32_t rank = 0);

struct TupleParts {
  struct Transition {
    TransitionForm form = TransitionForm::kZero;
    uint32_t rank = 0;
    const Part* part = nullptr;  // null for a zero transition, which stores nothing
    uint32_t unit = 0;           // unit within the part
  };
  std::vector<Transition> transitions;  // [heads]; zero in a checkpoint, because no earlier state is added to it
  DType transition_dtype = DType::kF32;
  const Part* state = nullptr;      // unit h belongs to head h
  const Part* exponents = nullptr;  // fp16 states only: [heads] i32 in one unit
};

// Checks that the object has a tuple of this shape for the layer. DATA_LOSS names the missing part. `object` must have
// passed DecodeHeader, or come from PlanObject or PlanForms.
absl::Status CheckTuple(const ObjectHeader& object, uint32_t layer, const TupleShape& shape);
// Checks like CheckTuple, and returns the parts. `object` must outlive the result.
absl::StatusOr<TupleParts> FindTuple(const ObjectHeader& object, uint32_t layer, const TupleShape& shape);

}  // namespace ashlar
