// SPDX-License-Identifier: Apache-2.0
// PartCheck: verifies parts of objects in place.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "proto/object.h"
#include "storage/objects/object_bytes.h"
#include "storage/transfer/cancel_flag.h"
#include "storage/transfer/gpu_lane.h"
#include "storage/transfer/unit_range.h"

namespace ashlar::storage {

// The stored checksum of a part, and the computed checksums of its units.
class PartCheck {
 public:
  PartCheck(const ObjectBytes& object, const Part& part)
      : object_(&object), part_(&part), unit_checksums_(part.units) {}

  const ObjectBytes& object() const { return *object_; }
  const Part& part() const { return *part_; }
  uint64_t* unit_checksums(uint32_t unit) { return unit_checksums_.data() + unit; }

  bool Holds() const;  // after all units have been hashed

 private:
  const ObjectBytes* object_;
  const Part* part_;
  std::vector<uint64_t> unit_checksums_;
};

// Hashes a range's units. `checksums` has one entry per unit of the range.
kernels::Event HashUnits(const kernels::Kernels& kernels, kernels::Queue& queue, const ObjectBytes& object,
                         const UnitRange& range, uint64_t* checksums);

// Hashes the parts of all checks, in host memory, spread over `workers`. Returns false, without a result, if cancelled.
bool RunChecks(const kernels::Kernels& kernels, kernels::Workers& workers, std::span<PartCheck> checks,
               const CancelFlag& cancel);
// The same for parts in GPU memory, by its kernels.
bool RunChecksOnGpu(GpuCalls& calls, std::span<PartCheck> checks, const CancelFlag& cancel);

}  // namespace ashlar::storage
