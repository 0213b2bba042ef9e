// One landing: objects' keys and values go to an engine's pages, and their tuples are verified where they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "proto/object.h"
#include "storage/cancel_flag.h"
#include "storage/object_bytes.h"
#include "storage/tier/tier.h"
#include "storage/transfer.h"
#include "storage/unit_range.h"

namespace ashlar::storage {

// An object to land. Header and slot stay until the landing is done.
struct LandSource {
  const ObjectHeader* header = nullptr;
  const Slot* slot = nullptr;
  uint64_t first_position = 0;  // where the run's token 0 stands
};

// A landing in steps, one an attention layer: verifies the linear layers before it, then lands its keys and values.
// Linear layers behind the last attention layer make a step of their own.
class LandJob {
 public:
  // Every source must fit the target (storage/transfer.h).
  LandJob(const kernels::Kernels& kernels, kernels::Workers& workers, const Tier& tier,
          const std::vector<LandSource>& sources, LandTarget target, CancelFlag cancel);

  size_t steps() const { return target_.rows.size() + (has_tail_ ? 1 : 0); }
  size_t attention_layers() const { return target_.rows.size(); }

  // On any thread, one step at a time in ascending order. Sources found corrupt are skipped from then on. Stops between
  // tasks when cancelled.
  void RunStep(size_t step);

  // After a step, on the thread that waits for it.
  bool corrupt(size_t source) const { return sources_[source].corrupt; }
  bool cancelled() const { return cancel_.cancelled(); }
  void ReleaseMemory() { target_.keep.reset(); }

 private:
  struct Source {
    const ObjectHeader* header;
    ObjectBytes bytes;
    uint64_t first_position;
    bool corrupt = false;
  };
  // What one part must hash to, and what it did.
  struct Check {
    Source* source;
    const Part* part;
    std::vector<uint64_t> unit_checksums;
  };
  struct Task {
    const Source* source;
    UnitRange range;
    const PagedRows* rows;  // of keys and values
    uint64_t* checksums;    // of the range's units
    const Part* scales;     // of the range's rows, or null; they are landed with these
    uint64_t* scale_checksums;
  };

  std::vector<Check> StepChecks(size_t step);
  void Verify(const Task& task) const;
  void Land(const Task& task, uint64_t step_bytes) const;  // of all that the task's step lands

  const kernels::Kernels& kernels_;
  kernels::Workers& workers_;
  LandTarget target_;
  CancelFlag cancel_;
  std::vector<Source> sources_;
  bool has_tail_ = false;
};

}  // namespace ashlar::storage
