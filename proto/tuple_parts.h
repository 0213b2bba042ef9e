// SPDX-License-Identifier: Apache-2.0
// FindTuple: one linear layer's tuple in an object, read in the same way by daemon and engine.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/layout.h"
#include "proto/object.h"

namespace ashlar {

// The sizes of a layer's tuple.
struct TupleShape {
  uint32_t heads = 0;
  uint32_t d_k = 0, d_v = 0;
  TransitionForm transition = TransitionForm::kDense;  // the family's own
};
TupleShape TupleShapeOf(const LinearLayer& layer);

// Bytes of one head's transition in a form, beside states of a type: of its unit.
uint64_t TransitionBytes(const TupleShape& shape, DType state, TransitionForm form, uint32_t rank = 0);

struct TupleParts {
  struct Transition {
    TransitionForm form = TransitionForm::kZero;
    uint32_t rank = 0;
    const Part* part = nullptr;  // null: zero, of which nothing is stored
    uint32_t unit = 0;           // of the part
  };
  std::vector<Transition> transitions;  // [heads]. A checkpoint's are zero: nothing that came before counts
  DType transition_dtype = DType::kF32;
  const Part* state = nullptr;      // unit h is head h's
  const Part* exponents = nullptr;  // of fp16 states: [heads] i32 in one unit
};

// Checks that the object has a tuple of this shape for the layer. DATA_LOSS names the missing part. `object` has passed
// DecodeHeader or comes from PlanObject or PlanForms.
absl::Status CheckTuple(const ObjectHeader& object, uint32_t layer, const TupleShape& shape);
// Checks the tuple like CheckTuple, and returns its parts. `object` must outlive the answer.
absl::StatusOr<TupleParts> FindTuple(const ObjectHeader& object, uint32_t layer, const TupleShape& shape);

}  // namespace ashlar
