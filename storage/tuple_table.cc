#include "storage/tuple_table.h"

#include "storage/transfer.h"

namespace ashlar::storage {
namespace {

// A checkpoint has none: nothing that came before counts.
const Part* TransitionOf(const ObjectHeader& object, uint32_t layer) {
  return object.Find(layer, PartForm::kTransitionDense);
}

// Whether the part has one matrix of rows × columns a head, of a type that needs no exponents beside it.
bool HasMatrices(const Part& part, const kernels::LinearShape& shape, int32_t rows, int32_t columns) {
  const bool state_type = part.dtype == DType::kF32 || part.dtype == DType::kBF16;
  return state_type && part.units == static_cast<uint32_t>(shape.heads) &&
         part.Bytes() == uint64_t{part.units} * rows * columns * kernels::ElementBytes(KernelType(part.dtype));
}

}  // namespace

bool HasTuple(const ObjectHeader& object, uint32_t layer, const kernels::LinearShape& shape) {
  const Part* state = object.Find(layer, PartForm::kState);
  if (state == nullptr || !HasMatrices(*state, shape, shape.d_k, shape.d_v)) return false;
  if (object.kind == ObjectKind::kCheckpoint) return true;
  const Part* transition = TransitionOf(object, layer);
  return transition != nullptr && HasMatrices(*transition, shape, shape.d_k, shape.d_k);
}

TupleTable::TupleTable(uint32_t layer, const kernels::LinearShape& shape, size_t objects)
    : layer_(layer), heads_of_layer_(shape.heads) {
  heads_.reserve(objects * static_cast<size_t>(shape.heads));
  views_.reserve(objects);
}

void TupleTable::Add(const ObjectHeader& object, const ObjectBytes& bytes, uint64_t first_position) {
  const Part& state = *object.Find(layer_, PartForm::kState);
  const Part* transition = TransitionOf(object, layer_);
  views_.push_back({.heads = heads_.data() + heads_.size(),
                    .state_dtype = KernelType(state.dtype),
                    .position = static_cast<int64_t>(first_position)});
  if (transition != nullptr) views_.back().transition_dtype = KernelType(transition->dtype);
  for (int32_t head = 0; head < heads_of_layer_; ++head) {
    const auto unit = static_cast<uint32_t>(head);
    kernels::HeadTuple tuple{.form = kernels::TransitionForm::kZero, .state = bytes.Unit(state, unit)};
    if (transition != nullptr) {
      tuple.form = kernels::TransitionForm::kDense;
      tuple.transition = bytes.Unit(*transition, unit);
    }
    heads_.push_back(tuple);
  }
}

}  // namespace ashlar::storage
