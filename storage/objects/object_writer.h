// SPDX-License-Identifier: Apache-2.0
// ObjectWriter: reserves space for new objects and publishes them.
#pragma once

#include <cstddef>

#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/objects/object_reference.h"
#include "storage/objects/object_table.h"

namespace ashlar::storage {

class ObjectWriter {
 public:
  // Both must outlive the writer.
  ObjectWriter(ObjectTable& table, const Clock& clock) : table_(table), clock_(clock) {}

  struct Reserved {
    ReserveOutcome outcome = ReserveOutcome::kNoSpace;
    ObjectReference object;  // set when granted
  };
  // Allocates space at the level for a new object, if necessary by evicting idle ones (Level::Allocate). Only the
  // caller uses the object until Publish; if its last reference ends before that, it is abandoned. An object that would
  // take longer to land than `recompute` (0: unknown) is declined. `flops`: the FLOPs that a hit saves (0: unknown,
  // they are estimated).
  Reserved Reserve(const TenantPool& pool, const ObjectHeader& plan, Nanos recompute = 0, double flops = 0,
                   size_t level = 0);
  // Tier::WhenGrown of the level.
  bool WhenGrown(TenantId tenant, size_t level, uint64_t extents, std::function<void(bool grown)> call) {
    return table_.levels()[level].tier().WhenGrown(tenant, extents, std::move(call));
  }
  // `header` is the plan, or one with other forms that takes no more extents, with its checksums. Extents that it does
  // not need are given back. Lookups find the object from now on.
  void Publish(const ObjectReference& object, ObjectHeader header);

 private:
  ObjectTable& table_;
  const Clock& clock_;
};

}  // namespace ashlar::storage
