// SPDX-License-Identifier: Apache-2.0
// PublishJob: one publish. An engine's tensors and pages become an object's bytes. The engine can still write to its own
// memory, so the bytes are copied and the copy is hashed, unit by unit, in any order and by any number of threads.
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
  // The source must fit the plan (storage/transfer/transfer.h). `gpu` may be null where neither of it nor of the tier
  // anything lies in its memory; where the tier does, all of the source must.
  PublishJob(const kernels::Kernels& kernels, kernels::Workers& workers, const Tier& tier, GpuLane* gpu,
             const ObjectHeader& plan, const Slot& slot, PublishSource source, CancelFlag cancel);

  // On any thread, once: copies every part and hashes it in the same pass, then writes the header. Stops between tasks
  // when cancelled.
  void Run();

  // After Run: the header as written, or nothing when cancelled. Lets go of the source's `keep`.
  std::optional<ObjectHeader> Finish();

 private:
  struct Task {
    UnitRange range;
    bool on_gpu;              // it is copied from there
    const std::byte* tensor;  // of a matrix part: its unit 0 in the engine's memory
    const PagedRows* rows;    // of keys and values
    uint64_t* checksums;      // of the range's units
    const Part* scales;       // of the range's rows, or null; they are gathered with these
    uint64_t* scale_checksums;
  };

  // By the order of the header's parts: checksums of their units.
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
