// SPDX-License-Identifier: Apache-2.0
#include "proto/tuple_parts.h"

#include "absl/strings/str_cat.h"

namespace ashlar {
namespace {

absl::Status DataLoss(uint32_t layer, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("object header: layer ", layer, " ", what));
}

// Returns whether the part can store the transitions of heads of this layer.
bool Fits(const Part& part, TransitionForm form, DType state, const TupleShape& shape) {
  if (part.unit_bytes != TransitionBytes(shape, state, form, part.rank)) return false;
  if (form == TransitionForm::kZero || form == shape.transition) return true;
  return form == TransitionForm::kLowRank && shape.transition == TransitionForm::kDense &&
         part.unit_bytes < TransitionBytes(shape, state, TransitionForm::kDense);
}

}  // namespace

TupleShape TupleShapeOf(const LinearLayer& layer) {
  return {.heads = layer.value_heads, .d_k = layer.d_k, .d_v = layer.d_v, .transition = layer.transition};
}

uint64_t TransitionBytes(const TupleShape& shape, DType state, TransitionForm form, uint32_t rank) {
  const uint64_t d_k = shape.d_k, element = ElementBytes(TransitionType(state));
  switch (form) {
    case TransitionForm::kScalar:
      return sizeof(float);
    case TransitionForm::kDiagonal:
      return d_k * sizeof(float);
    case TransitionForm::kDense:
      return d_k * d_k * element;
    case TransitionForm::kElementwise:
      return shape.d_v * sizeof(float);
    case TransitionForm::kLowRank:
      return d_k * sizeof(float) + 2 * uint64_t{rank} * d_k * element;
    case TransitionForm::kZero:
      return 0;
  }
  return 0;
}

absl::Status CheckTuple(const ObjectHeader& object, uint32_t layer, const TupleShape& shape) {
  const Part* const state = object.Find(layer, PartForm::kState);
  if (state == nullptr || state->units != shape.heads ||
      state->unit_bytes != uint64_t{shape.d_k} * shape.d_v * ElementBytes(state->dtype) ||
      ElementBytes(state->dtype) < ElementBytes(DType::kF16)) {
    return DataLoss(layer, "has no state");
  }
  for (const Part& part : object.Layer(layer)) {
    const std::optional<TransitionForm> form = TransitionFormOf(part.form);
    if (form.has_value() && !Fits(part, *form, state->dtype, shape)) {
      return DataLoss(layer, absl::StrCat("has a different ", Name(part.form)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TupleParts> FindTuple(const ObjectHeader& object, uint32_t layer, const TupleShape& shape) {
  if (absl::Status status = CheckTuple(object, layer, shape); !status.ok()) return status;
  TupleParts tuple{.transitions = std::vector<TupleParts::Transition>(shape.heads),
                   .state = object.Find(layer, PartForm::kState),
                   .exponents = object.Find(layer, PartForm::kStateExponents)};
  tuple.transition_dtype = TransitionType(tuple.state->dtype);
  for (const Part& part : object.Layer(layer)) {
    const std::optional<TransitionForm> form = TransitionFormOf(part.form);
    if (!form.has_value() || part.Empty()) continue;
    for (uint32_t unit = 0; unit < part.units; ++unit) {
      tuple.transitions[part.head_group + unit] = {*form, part.rank, &part, unit};
    }
  }
  return tuple;
}

}  // namespace ashlar
