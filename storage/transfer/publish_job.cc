// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/publish_job.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

namespace ashlar::storage {

PublishJob::PublishJob(const kernels::Kernels& kernels, kernels::Workers& workers, const Tier& tier, GpuLane* gpu,
                       const ObjectHeader& plan, const Slot& slot, PublishSource source, CancelFlag cancel)
    : kernels_(kernels),
      workers_(workers),
      gpu_(gpu),
      tier_(tier),
      slot_(slot),
      header_(plan),
      object_(tier, slot),
      source_(std::move(source)),
      cancel_(std::move(cancel)) {
  header_.provenance = source_.provenance;
}

void PublishJob::Run() {
  Checksums checksums;
  for (const Part& part : header_.parts) checksums.emplace_back(part.units);
  std::vector<Task> tasks;
  for (size_t i = 0; i < header_.parts.size(); ++i) AddTasks(i, checksums, tasks);
  const auto behind = std::stable_partition(tasks.begin(), tasks.end(), [](const Task& task) { return task.on_gpu; });
  std::optional<GpuCalls> calls;  // in flight while the CPU does its part
  if (behind != tasks.begin()) calls.emplace(*gpu_);
  for (auto task = tasks.begin(); task != behind && !cancel_.cancelled(); ++task) CopyOnGpu(*task, *calls);
  kernels::ParallelFor(workers_, tasks.end() - behind, [&](int64_t i) {
    if (!cancel_.cancelled()) Copy(behind[i], kernels_, *kernels_.MakeQueue(nullptr)).Wait();
  });
  calls.reset();
  if (cancel_.cancelled()) return;
  for (size_t i = 0; i < header_.parts.size(); ++i) {
    Part& part = header_.parts[i];
    if (!part.Empty()) part.checksum = kernels::CombineChecksums(checksums[i]);
  }
  WriteStart(tier_, slot_, EncodeHeader(header_));
}

std::optional<ObjectHeader> PublishJob::Finish() {
  source_.keep.reset();
  if (cancel_.cancelled()) return std::nullopt;
  return std::move(header_);
}

void PublishJob::AddTasks(size_t index, Checksums& checksums, std::vector<Task>& tasks) const {
  const Part& part = header_.parts[index];
  if (part.Empty() || IsScales(part.form)) return;  // scales are gathered with the rows that they scale
  const auto rows = std::find_if(source_.rows.begin(), source_.rows.end(),
                                 [&](const PagedRows& candidate) { return candidate.layer == part.layer; });
  const PublishSource::Tensor* const tensor = FindTensor(source_, part);
  const bool paged = IsRows(part.form);
  const Part* const scales = paged ? header_.Find(part.layer, ScalesOf(part.form)) : nullptr;
  SplitPart(part, [&](const UnitRange& range) {
    tasks.push_back({.range = range,
                     .on_gpu = (paged ? rows->gpu : tensor->gpu) != nullptr,
                     .tensor = paged ? nullptr : tensor->data,
                     .rows = paged ? &*rows : nullptr,
                     .checksums = checksums[index].data() + range.first,
                     .scales = scales,
                     .scale_checksums =
                         scales == nullptr ? nullptr : checksums[scales - header_.parts.data()].data() + range.first});
  });
}

void PublishJob::CopyOnGpu(const Task& task, GpuCalls& calls) const {
  calls.Submit(
      {task.range.count, task.checksums, task.scale_checksums},
      [&](kernels::Queue& queue, const GpuCalls::Checksums& reached) {
        Task there = task;
        there.checksums = reached.units;
        there.scale_checksums = reached.scales;
        return Copy(there, calls.kernels(), queue);
      },
      [] {});
}

kernels::Event PublishJob::Copy(const Task& task, const kernels::Kernels& kernels, kernels::Queue& queue) const {
  return task.rows != nullptr ? Gather(task, kernels, queue) : CopyTensor(task, kernels, queue);
}

kernels::Event PublishJob::CopyTensor(const Task& task, const kernels::Kernels& kernels, kernels::Queue& queue) const {
  const UnitRange& range = task.range;
  const auto target = UnitPointers<void>(object_, range);
  std::array<const void*, kMaxTaskUnits> source;
  for (uint32_t i = 0; i < range.count; ++i) {
    source[i] = task.tensor + uint64_t{range.first + i} * range.part->unit_bytes;
  }
  return kernels.Checksum({.units = {source.data(), range.count},
                           .unit_bytes = range.part->unit_bytes,
                           .last_unit_bytes = range.LastUnitBytes(),
                           .target = target.data(),
                           .unit_checksums = task.checksums,
                           .batch_bytes = static_cast<int64_t>(header_.bytes)},
                          queue);
}

kernels::Event PublishJob::Gather(const Task& task, const kernels::Kernels& kernels, kernels::Queue& queue) const {
  const UnitRange& range = task.range;
  const bool keys = range.part->form != PartForm::kValues;
  const auto units = UnitPointers<void>(object_, range);
  std::array<float*, kMaxTaskUnits> scales;
  if (task.scales != nullptr) scales = UnitPointers<float>(object_, {task.scales, range.first, range.count});
  kernels::PagedSlots slots = keys ? task.rows->keys : task.rows->values;
  if (slots.page_table == nullptr) slots.page_table = source_.page_table->data();
  const uint64_t first_position = source_.first_position + header_.first_token + range.FirstRow();
  return kernels.Gather({.source = slots,
                         .first_position = static_cast<int64_t>(first_position),
                         .units = units.data(),
                         .scales = task.scales != nullptr ? scales.data() : nullptr,
                         .unit_tokens = static_cast<int32_t>(range.part->unit_tokens),
                         .tokens = static_cast<int64_t>(range.Rows()),
                         .heads = task.rows->heads,
                         .dim = keys ? task.rows->key_dim : task.rows->value_dim,
                         .unit_checksums = task.checksums,
                         .scale_checksums = task.scale_checksums,
                         .batch_bytes = static_cast<int64_t>(header_.bytes)},
                        queue);
}

}  // namespace ashlar::storage
