// SPDX-License-Identifier: Apache-2.0
// LandJob: one landing. It writes keys and values of objects to an engine's pages, and verifies their tuples in place.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "proto/object.h"
#include "storage/objects/object_bytes.h"
#include "storage/tier/tier.h"
#include "storage/transfer/cancel_flag.h"
#include "storage/transfer/gpu_lane.h"
#include "storage/transfer/part_check.h"
#include "storage/transfer/transfer.h"
#include "storage/transfer/unit_range.h"

namespace ashlar::storage {

// An object to land. Header and slot stay until the landing ends.
struct LandSource {
  const ObjectHeader* header = nullptr;
  const Slot* slot = nullptr;
  uint64_t first_position = 0;   // position of the run's token 0
  uint64_t tokens = UINT64_MAX;  // stored tokens to land, from the first; 0: only verify tuples
  int64_t rotary_shift = 0;      // keys are rotated by first_position + rotary_shift
  const Tier* tier = nullptr;    // tier of the slot
};

// A landing in steps, one per attention layer: verifies the linear layers before it, then lands its keys and values.
// Linear layers after the last attention layer form their own step. Many steps run as one, so that threads do not wait
// for each other between layers.
class LandJob {
 public:
  // Every source must fit the target (storage/transfer/transfer.h). `gpu` may be null if neither rows nor a source's
  // tier are in its memory; if a tier is, the rows must be too.
  LandJob(const kernels::Kernels& kernels, kernels::Workers& workers, GpuLane* gpu,
          const std::vector<LandSource>& sources, LandTarget target, CancelFlag cancel);

  // Callable on any thread, one call at a time. Runs whole steps below `end_step` until they have read `bytes` or none
  // is left. `landed` is called on the working threads, one at a time, when layers() has increased and more follow.
  // A corrupt source is skipped afterwards. Stops between tasks when cancelled, and between steps when
  // `should_yield`, called on those threads, is true.
  void Run(uint64_t bytes, size_t end_step, const std::function<void()>& landed,
           const std::function<bool()>& should_yield);

  // For the thread that waits for Run.
  bool finished() const { return next_ == steps(); }
  bool CanRun(size_t end) const { return next_ < end; }
  // Returns the first step that reads past the source's first `bytes` bytes; a number past the last step if none does.
  size_t FirstStepAfter(size_t source, uint64_t bytes) const;
  // Returns how many of the source's bytes, from the start, the next step needs.
  uint64_t NextNeeds(size_t source) const;
  void Skip(size_t source) { sources_[source].object->corrupt = true; }
  void ReleaseMemory() { target_.keep.reset(); }

  // Any thread, any time.
  bool cancelled() const { return cancel_.cancelled(); }
  uint32_t layers() const { return layers_.load(std::memory_order_acquire); }  // attention layers landed so far
  bool corrupt(size_t source) const { return sources_[source].object->corrupt.load(std::memory_order_acquire); }

 private:
  // A text may be repeated in a prompt, but its object is one: its tuples are verified once.
  struct Object {
    const ObjectHeader* header;
    ObjectBytes bytes;
    bool on_gpu;
    std::atomic<bool> corrupt{false};
  };
  struct Source {
    Object* object;
    uint64_t first_position, tokens;
    int64_t rotary_shift;
    bool repeats;  // an earlier source has the same object
  };
  struct Check {
    const Source* source;
    PartCheck part;
  };
  struct Step {
    Step(size_t at, std::vector<Check> all) : index(at), checks(std::move(all)) {}
    size_t index;  // index in the run
    std::vector<Check> checks;
    std::atomic<size_t> tasks_left{0};
    std::deque<std::vector<uint64_t>> partial_checksums = {};  // checksums of partly landed parts; stable addresses
  };
  struct Task {
    Step* step;
    const Source* source;
    UnitRange range;
    const PagedRows* rows;  // set if the part has keys or values
    uint64_t tokens;        // number of tokens to land
    uint64_t* checksums;    // one checksum per unit of the range
    const Part* scales;     // scales of the range's rows, or null; landed together
    uint64_t* scale_checksums;
    bool on_gpu;
  };

  uint64_t LayersBegin(size_t step) const;  // the first layer of a step
  size_t steps() const { return target_.rows.size() + (has_tail_ ? 1 : 0); }
  std::vector<Check> StepChecks(size_t step);
  // Returns the check of the scales of `rows`, if any: among the following checks of the same object and layer.
  static Check* FindScales(const Check& rows, std::span<Check> following);
  void AppendTasks(const PagedRows* rows, Step& step, std::vector<Task>& tasks);
  void AppendInPart(Task task, std::vector<Task>& tasks) const;
  // Lands or verifies. `batch_bytes` is the size of the whole batch.
  kernels::Event Move(const Task& task, uint64_t batch_bytes, const kernels::Kernels& kernels,
                      kernels::Queue& queue) const;
  kernels::Event Land(const Task& task, uint64_t batch_bytes, const kernels::Kernels& kernels,
                      kernels::Queue& queue) const;
  void MoveOnGpu(const Task& task, uint64_t batch_bytes, GpuCalls& calls, std::function<void()> done) const;
  void Conclude(const Step& step);
  // Returns the first step that is left for later; the others have run, unless the job was cancelled.
  size_t RunTasks(std::span<Task> tasks, kernels::Workers* workers, uint64_t batch_bytes,
                  const std::function<bool()>& should_yield, const std::function<void(const Task&)>& end);

  const kernels::Kernels& kernels_;
  kernels::Workers& workers_;
  GpuLane* const gpu_;
  LandTarget target_;
  CancelFlag cancel_;
  std::vector<std::unique_ptr<Object>> objects_;
  std::vector<Source> sources_;
  bool has_tail_ = false;
  size_t next_ = 0;  // step
  std::atomic<uint32_t> layers_{0};
};

}  // namespace ashlar::storage
