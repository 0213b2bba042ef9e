// SPDX-License-Identifier: Apache-2.0
// TupleTable: an object's tuples in the form that kernels take.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "proto/object.h"
#include "proto/tuple_parts.h"
#include "storage/objects/object_bytes.h"

namespace ashlar::storage {

// Returns whether the object has a tuple of this shape for the layer.
bool HasTuple(const ObjectHeader& object, uint32_t layer, const kernels::LinearShape& shape);

// Pointers to the tuples of one layer in several objects. The objects must have them (HasTuple) and must not move.
class TupleTable {
 public:
  TupleTable(uint32_t layer, const kernels::LinearShape& shape, size_t objects);

  // `first_position` is that of the run's token 0. `gpu` is the GPU of the object; null for host memory. At most as
  // many objects as the table was created for.
  void Add(const ObjectHeader& object, const ObjectBytes& bytes, const kernels::Gpu* gpu, uint64_t first_position);
  // In the order of Add.
  const std::vector<kernels::TupleView>& views() const { return views_; }

 private:
  const uint32_t layer_;
  const TupleShape shape_;
  std::vector<kernels::HeadTuple> heads_;  // never reallocated, because views point into it
  std::vector<kernels::TupleView> views_;
};

}  // namespace ashlar::storage
