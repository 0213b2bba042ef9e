// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/part_check.h"

namespace ashlar::storage {

bool PartCheck::Holds() const {
  return kernels::CombineChecksums(unit_checksums_) == part_->checksum;
}

kernels::Event HashUnits(const kernels::Kernels& kernels, kernels::Queue& queue, const ObjectBytes& object,
                         const UnitRange& range, uint64_t* checksums) {
  const auto units = UnitPointers<const void>(object, range);
  return kernels.Checksum({.units = {units.data(), range.count},
                           .unit_bytes = range.part->unit_bytes,
                           .last_unit_bytes = range.LastUnitBytes(),
                           .unit_checksums = checksums},
                          queue);
}

bool RunChecks(const kernels::Kernels& kernels, kernels::Workers& workers, std::span<PartCheck> checks,
               const CancelFlag& cancel) {
  struct Task {
    PartCheck* check;
    UnitRange range;
  };
  std::vector<Task> tasks;
  for (PartCheck& check : checks) {
    SplitPart(check.part(), [&](const UnitRange& range) { tasks.push_back({&check, range}); });
  }
  kernels::ParallelFor(workers, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    if (cancel.cancelled()) return;
    const Task& task = tasks[static_cast<size_t>(i)];
    HashUnits(kernels, *kernels.MakeQueue(nullptr), task.check->object(), task.range,
              task.check->unit_checksums(task.range.first))
        .Wait();
  });
  return !cancel.cancelled();
}

bool RunChecksOnGpu(GpuCalls& calls, std::span<PartCheck> checks, const CancelFlag& cancel) {
  for (PartCheck& check : checks) {
    SplitPart(check.part(), [&](const UnitRange& range) {
      if (cancel.cancelled()) return;
      calls.Submit(
          {range.count, check.unit_checksums(range.first), nullptr},
          [&](kernels::Queue& queue, const GpuCalls::Checksums& reached) {
            return HashUnits(calls.kernels(), queue, check.object(), range, reached.units);
          },
          [] {});
    });
  }
  calls.Finish();
  return !cancel.cancelled();
}

}  // namespace ashlar::storage
