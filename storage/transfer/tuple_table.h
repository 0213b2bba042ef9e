// SPDX-License-Identifier: Apache-2.0
// TupleTable: an object's tuples in the kernels' form.
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

// The tuples of one layer, of several objects: pointers to where they lie. The objects must have them (HasTuple) and
// stay where they are.
class TupleTable {
 public:
  TupleTable(uint32_t layer, const kernels::LinearShape& shape, size_t objects);

  // `first_position`: where the run's token 0 stands. `gpu`: in whose memory the object lies; null: the processor's. At
  // most as many as the table was made for.
  void Add(const ObjectHeader& object, const ObjectBytes& bytes, const kernels::Gpu* gpu, uint64_t first_position);
  // In the order in which they were added.
  const std::vector<kernels::TupleView>& views() const { return views_; }

 private:
  const uint32_t layer_;
  const TupleShape shape_;
  std::vector<kernels::HeadTuple> heads_;  // never grows: views point into it
  std::vector<kernels::TupleView> views_;
};

}  // namespace ashlar::storage
