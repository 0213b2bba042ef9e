// SPDX-License-Identifier: Apache-2.0
// PublishJob: one publish. It copies an engine's tensors and pages to an object. The engine can still write to its
// memory, so the copy is hashed, unit by unit, in any order and by any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/kernels.h"
#include "proto/object.h"
#include "storage/objects/object_bytes.h"
#include "storage/tier/tier.h"
#include "storage/transfer/cancel_flag.h"
#include "storage/transfer/gpu_lane.h"
#include "storage/transfer/transfer.h"
#include "storage/transfer/unit_range.h"

namespace ashlar::storage {

class PublishJob {
 public:
  // The source must fit the plan (storage/transfer/transfer.h). `gpu` may be null if neither source nor tier are in its
  // memory; if the tier is, the source must be too.
  PublishJob(const kernels::Kernels& kernels, kernels::Workers& workers, const Tier& tier, GpuLane* gpu,
             const ObjectHeader& plan, const Slot& slot, PublishSource source, CancelFlag cancel);

  // Any thread, once. Copies and hashes every part in one pass, then writes the header. Stops between tasks when
  // cancelled.
  void Run();

  // Call after Run. Returns the written header, or nothing when cancelled. Releases the source's `keep`.
  std::optional<ObjectHeader> Finish();

 private:
  struct Task {
    UnitRange range;
    bool on_gpu;              // copied from GPU memory
    const std::byte* tensor;  // matrix parts only: the part's unit 0 in the engine's memory
    const PagedRows* rows;    // set if the part has keys or values
    uint64_t* checksums;      // one checksum per unit of the range
    const Part* scales;       // scales of the range's rows, or null; gathered together
    uint64_t* scale_checksums;
  };

  // Checksums of the units, in the order of the header's parts.
  using Checksums = std::vector<std::vector<uint64_t>>;
  void AddTasks(size_t part, Checksums& checksums, std::vector<Task>& tasks) const;
  kernels::Event Copy(const Task& task, const kernels::Kernels& kernels, kernels::Queue& queue) const;
  kernels::Event CopyTensor(const Task& task, const kernels::Kernels& kernels, kernels::Queue& queue) const;
  kernels::Event Gather(const Task& task, const kernels::Kernels& kernels, kernels::Queue& queue) const;
  void CopyOnGpu(const Task& task, GpuCalls& calls) const;

  const kernels::Kernels& kernels_;
  kernels::Workers& workers_;
  GpuLane* const gpu_;
  const Tier& tier_;
  const Slot slot_;
  ObjectHeader header_;
  ObjectBytes object_;
  PublishSource source_;
  CancelFlag cancel_;
};

}  // namespace ashlar::storage
