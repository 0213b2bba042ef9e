// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/tuple_table.h"

#include <cstring>

#include "proto/tuple_parts.h"
#include "storage/transfer/transfer.h"

namespace ashlar::storage {
namespace {

TupleShape ShapeOf(const kernels::LinearShape& shape) {
  return {.heads = static_cast<uint32_t>(shape.heads),
          .d_k = static_cast<uint32_t>(shape.d_k),
          .d_v = static_cast<uint32_t>(shape.d_v),
          .transition = NaturalForm(shape.family)};
}

}  // namespace

bool HasTuple(const ObjectHeader& object, uint32_t layer, const kernels::LinearShape& shape) {
  return CheckTuple(object, layer, ShapeOf(shape)).ok();
}

TupleTable::TupleTable(uint32_t layer, const kernels::LinearShape& shape, size_t objects)
    : layer_(layer), shape_(ShapeOf(shape)) {
  heads_.reserve(objects * shape_.heads);
  views_.reserve(objects);
}

void TupleTable::Add(const ObjectHeader& object, const ObjectBytes& bytes, const kernels::Gpu* gpu,
                     uint64_t first_position) {
  const TupleParts tuple = *FindTuple(object, layer_, shape_);
  views_.push_back({.heads = heads_.data() + heads_.size(),
                    .transition_dtype = tuple.transition_dtype,
                    .state_dtype = tuple.state->dtype,
                    .position = static_cast<int64_t>(first_position)});
  std::vector<int32_t> exponents(shape_.heads);
  if (tuple.exponents != nullptr) {
    const std::byte* const stored = bytes.Unit(*tuple.exponents, 0);
    const size_t size = exponents.size() * sizeof(int32_t);
    gpu == nullptr ? static_cast<void>(std::memcpy(exponents.data(), stored, size))
                   : gpu->CopyToHost(exponents.data(), stored, size);
  }
  for (uint32_t head = 0; head < shape_.heads; ++head) {
    const TupleParts::Transition& transition = tuple.transitions[head];
    kernels::HeadTuple& out = heads_.emplace_back(kernels::HeadTuple{.form = transition.form,
                                                                     .rank = static_cast<int32_t>(transition.rank),
                                                                     .state = bytes.Unit(*tuple.state, head),
                                                                     .state_exponent = exponents[head]});
    if (transition.part != nullptr) out.transition = bytes.Unit(*transition.part, transition.unit);
  }
}

}  // namespace ashlar::storage
