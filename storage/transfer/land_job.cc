// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/land_job.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <span>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kernels/mutex.h"

namespace ashlar::storage {
namespace {

// Bytes that one thread moves while another one wakes up.
constexpr uint64_t kOneThreadBytes = 512 << 10;

}  // namespace

LandJob::LandJob(const kernels::Kernels& kernels, kernels::Workers& workers, GpuLane* gpu,
                 const std::vector<LandSource>& sources, LandTarget target, CancelFlag cancel)
    : kernels_(kernels), workers_(workers), gpu_(gpu), target_(std::move(target)), cancel_(std::move(cancel)) {
  for (PagedRows& rows : target_.rows) {
    // The vector has moved here, and its elements with it.
    if (rows.keys.page_table == nullptr) rows.keys.page_table = target_.page_table.data();
    rows.values.page_table = rows.keys.page_table;
  }
  sources_.reserve(sources.size());
  absl::flat_hash_map<const ObjectHeader*, Object*> objects;
  for (const LandSource& source : sources) {
    Object*& object = objects[source.header];
    const bool repeats = object != nullptr;
    if (!repeats) {
      const Tier& tier = *source.tier;
      object = objects_.emplace_back(new Object{source.header, ObjectBytes(tier, *source.slot), tier.gpu() != nullptr})
                   .get();
    }
    sources_.push_back({object, source.first_position, source.tokens, source.rotary_shift, repeats});
    const std::vector<Part>& parts = source.header->parts;
    has_tail_ |= !parts.empty() && (target_.rows.empty() || parts.back().layer > target_.rows.back().layer);
  }
}

uint64_t LandJob::LayersBegin(size_t step) const {
  if (step == 0) return 0;
  return step <= target_.rows.size() ? uint64_t{target_.rows[step - 1].layer} + 1 : UINT64_MAX;
}

size_t LandJob::FirstStepAfter(size_t source, uint64_t bytes) const {
  const ObjectHeader& header = *sources_[source].object->header;
  if (bytes >= header.bytes) return SIZE_MAX;
  // Parts are sorted by layer.
  const auto ends_after = [bytes](const Part& part) { return part.End() > bytes; };
  const auto part = std::ranges::find_if(header.parts, ends_after);
  if (part == header.parts.end()) return SIZE_MAX;
  const auto& rows = target_.rows;
  return std::ranges::lower_bound(rows, part->layer, {}, &PagedRows::layer) - rows.begin();
}

uint64_t LandJob::NextNeeds(size_t source) const {
  const ObjectHeader& header = *sources_[source].object->header;
  uint64_t needed = 0;
  for (const Part& part : header.parts) {
    if (part.layer < LayersBegin(next_ + 1)) needed = std::max(needed, part.End());
  }
  return needed;
}

void LandJob::Run(uint64_t bytes, size_t end_step, const std::function<void()>& landed,
                  const std::function<bool()>& should_yield) {
  std::deque<Step> batch;  // a deque, because elements must not move
  std::vector<Task> tasks;
  uint64_t read = 0, landed_bytes = 0;
  const size_t first = next_;
  while (!finished() && next_ < end_step && read < bytes) {
    const PagedRows* rows = next_ < target_.rows.size() ? &target_.rows[next_] : nullptr;
    Step& step = batch.emplace_back(batch.size(), StepChecks(next_++));
    AppendTasks(rows, step, tasks);
    for (const Check& check : step.checks) {
      const Part& part = check.part.part();
      read += part.Bytes();
      if (IsPaged(part.form)) landed_bytes += part.Bytes();
    }
  }
  struct {
    Mutex mutex;
    size_t steps ABSL_GUARDED_BY(mutex) = 0;  // completed in order
  } concluded;
  const auto conclude = [&] {
    MutexLock lock(concluded.mutex);
    const uint32_t before = layers();
    size_t& steps = concluded.steps;
    for (; steps < batch.size() && batch[steps].tasks_left == 0; ++steps) Conclude(batch[steps]);
    const uint32_t now = static_cast<uint32_t>(std::min(first + steps, target_.rows.size()));
    layers_.store(now, std::memory_order_release);
    const bool all = steps == batch.size() && finished();  // Run returns the result instead
    if (now > before && !all) landed();
  };
  const auto end = [&](const Task& task) {
    if (--task.step->tasks_left == 0) conclude();
  };
  // A skipped source is never concluded: its integrity is unknown.
  const auto behind = std::stable_partition(tasks.begin(), tasks.end(), [](const Task& task) { return task.on_gpu; });
  std::optional<GpuCalls> calls;  // in flight while the CPU does its part
  if (behind != tasks.begin()) calls.emplace(*gpu_);
  for (auto task = tasks.begin(); task != behind && !cancelled(); ++task) {
    MoveOnGpu(*task, landed_bytes, *calls, [&end, task] { end(*task); });
  }
  kernels::Workers* const workers = read <= kOneThreadBytes ? nullptr : &workers_;
  // Calls that a GPU has begun run to their end.
  const size_t left = RunTasks(std::span(behind, tasks.end()), workers, landed_bytes,
                               calls.has_value() ? [] { return false; } : should_yield, end);
  calls.reset();
  if (left < batch.size()) next_ = first + left;
  if (!cancelled()) conclude();  // steps without tasks
}

size_t LandJob::RunTasks(std::span<Task> tasks, kernels::Workers* workers, uint64_t batch_bytes,
                         const std::function<bool()>& should_yield, const std::function<void(const Task&)>& end) {
  std::atomic<size_t> left = SIZE_MAX;
  kernels::ParallelFor(workers, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    const Task& task = tasks[i];
    const size_t step = task.step->index;
    // Tasks begin in order. Some tasks of an abandoned step may be done already; they run again.
    const bool begins = i > 0 && tasks[i - 1].step != task.step;
    if (begins && step < left && should_yield()) {
      for (size_t before = left; step < before && !left.compare_exchange_weak(before, step);) {
      }
    }
    if (cancelled() || step >= left) return;
    if (!task.source->object->corrupt) Move(task, batch_bytes, kernels_, *kernels_.MakeQueue(nullptr)).Wait();
    end(task);
  });
  return left;
}

LandJob::Check* LandJob::FindScales(const Check& rows, std::span<Check> following) {
  for (Check& other : following) {
    const Part &part = other.part.part(), &of = rows.part.part();
    if (other.source != rows.source || part.layer != of.layer) return nullptr;
    if (part.form == ScalesOf(of.form)) return &other;
  }
  return nullptr;
}

void LandJob::AppendTasks(const PagedRows* rows, Step& step, std::vector<Task>& tasks) {
  const size_t before = tasks.size();
  for (size_t i = 0; i < step.checks.size(); ++i) {
    Check& check = step.checks[i];
    const Part& part = check.part.part();
    const bool paged = rows != nullptr && part.layer == rows->layer && IsPaged(part.form);
    if (paged && IsScales(part.form)) continue;  // landed with the rows that they scale
    Check* const scales = paged ? FindScales(check, std::span(step.checks).subspan(i + 1)) : nullptr;
    SplitPart(part, [&](const UnitRange& range) {
      Task task{.step = &step,
                .source = check.source,
                .range = range,
                .rows = paged ? rows : nullptr,
                .tokens = paged ? range.Rows() : 0,
                .checksums = check.part.unit_checksums(range.first),
                .scales = scales != nullptr ? &scales->part.part() : nullptr,
                .scale_checksums = scales != nullptr ? scales->part.unit_checksums(range.first) : nullptr,
                .on_gpu = check.source->object->on_gpu || (paged && rows->gpu != nullptr)};
      if (paged && range.FirstRow() + task.tokens > check.source->tokens) {
        AppendInPart(task, tasks);
      } else {
        tasks.push_back(task);
      }
    });
  }
  step.tasks_left = tasks.size() - before;
}

// For a range that is landed in part: all of it is verified, and its first rows are landed separately, because no
// checksum covers them alone.
void LandJob::AppendInPart(Task task, std::vector<Task>& tasks) const {
  Task verify = task;
  verify.rows = nullptr;
  verify.scales = nullptr;
  verify.scale_checksums = nullptr;
  verify.on_gpu = task.source->object->on_gpu;
  tasks.push_back(verify);
  if (task.scales != nullptr) {
    verify.range.part = task.scales;
    verify.checksums = task.scale_checksums;
    tasks.push_back(verify);
  }
  const uint64_t first = task.range.FirstRow(), wanted = task.source->tokens;
  if (wanted <= first) return;
  task.tokens = wanted - first;
  task.checksums = task.step->partial_checksums.emplace_back(2 * size_t{task.range.count}).data();
  if (task.scales != nullptr) task.scale_checksums = task.checksums + task.range.count;
  tasks.push_back(task);
}

void LandJob::Conclude(const Step& step) {
  for (const Check& check : step.checks) {
    if (!check.part.Holds()) check.source->object->corrupt = true;
  }
}

std::vector<LandJob::Check> LandJob::StepChecks(size_t step) {
  const uint64_t begin = LayersBegin(step), end = LayersBegin(step + 1);
  std::vector<Check> checks;
  for (const Source& source : sources_) {
    if (source.object->corrupt) continue;
    const std::vector<Part>& parts = source.object->header->parts;  // ascending by layer
    for (auto part = std::ranges::lower_bound(parts, begin, {}, &Part::layer); part != parts.end() && part->layer < end;
         ++part) {
      const bool wanted = IsPaged(part->form) ? source.tokens > 0 : !source.repeats;
      if (part->Empty() || !wanted) continue;
      checks.push_back({&source, PartCheck(source.object->bytes, *part)});
    }
  }
  return checks;
}

kernels::Event LandJob::Move(const Task& task, uint64_t batch_bytes, const kernels::Kernels& kernels,
                             kernels::Queue& queue) const {
  if (task.rows != nullptr) return Land(task, batch_bytes, kernels, queue);
  return HashUnits(kernels, queue, task.source->object->bytes, task.range, task.checksums);
}

void LandJob::MoveOnGpu(const Task& task, uint64_t batch_bytes, GpuCalls& calls, std::function<void()> done) const {
  calls.Submit(
      {task.range.count, task.checksums, task.scale_checksums},
      [&](kernels::Queue& queue, const GpuCalls::Checksums& reached) {
        Task there = task;
        there.checksums = reached.units;
        there.scale_checksums = reached.scales;
        return Move(there, batch_bytes, calls.kernels(), queue);
      },
      std::move(done));
}

kernels::Event LandJob::Land(const Task& task, uint64_t batch_bytes, const kernels::Kernels& kernels,
                             kernels::Queue& queue) const {
  const UnitRange& range = task.range;
  const bool keys = range.part->form != PartForm::kValues;
  const bool turned = keys != task.rows->latent;
  const auto units = UnitPointers<const void>(task.source->object->bytes, range);
  std::array<const float*, kMaxTaskUnits> scales;
  if (task.scales != nullptr) {
    scales = UnitPointers<const float>(task.source->object->bytes, {task.scales, range.first, range.count});
  }
  // Keys are stored as in a run that begins at position 0. Rotating them by the current position of the run's token 0
  // is right for every token, whichever of them are stored.
  const int64_t delta = static_cast<int64_t>(task.source->first_position) + task.source->rotary_shift;
  const uint64_t first_position =
      task.source->first_position + task.source->object->header->first_token + range.FirstRow();
  return kernels.Land({.source = {.units = units.data(),
                                  .scales = task.scales != nullptr ? scales.data() : nullptr,
                                  .unit_tokens = static_cast<int32_t>(range.part->unit_tokens),
                                  .tokens = static_cast<int64_t>(task.tokens),
                                  .heads = task.rows->heads,
                                  .dim = keys ? task.rows->key_dim : task.rows->value_dim,
                                  .dtype = range.part->dtype},
                       .rotation = turned ? task.rows->rotation : kernels::Rotation{},
                       .delta = delta,
                       .target = keys ? task.rows->keys : task.rows->values,
                       .first_position = static_cast<int64_t>(first_position),
                       .unit_checksums = task.checksums,
                       .scale_checksums = task.scale_checksums,
                       .batch_bytes = static_cast<int64_t>(batch_bytes)},
                      queue);
}

}  // namespace ashlar::storage
