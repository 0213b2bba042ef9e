// SPDX-License-Identifier: Apache-2.0
// ComposeJob: one composition. It applies cached tuples and runs of tokens to an engine's running states.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "kernels/kernels.h"
#include "proto/object.h"
#include "storage/objects/object_bytes.h"
#include "storage/tier/tier.h"
#include "storage/transfer/cancel_flag.h"
#include "storage/transfer/composition.h"
#include "storage/transfer/gpu_lane.h"
#include "storage/transfer/part_check.h"

namespace ashlar::storage {

// The object of one interior. Header and slot stay until the composition ends.
struct ComposeSource {
  const ObjectHeader* header = nullptr;
  const Slot* slot = nullptr;
  std::vector<bool> verified;  // one per layer of the composition: its tuple is already verified
  const Tier* tier = nullptr;  // tier of the slot
};

class ComposeJob {
 public:
  // One source per interior, each with a tuple for every layer (tuple_table.h). `gpu` is the lane of the composition's
  // GPU, which can access the tiers of all sources; null if everything is in host memory.
  ComposeJob(const kernels::Kernels& kernels, kernels::Workers& workers, GpuLane* gpu,
             std::vector<ComposeSource> sources, Composition composition, CancelFlag cancel);

  // Callable on any thread, one call at a time, until finished. Returns between layers when `should_yield` is true.
  // Verifies everything unverified before anything is written; writes nothing if a source is corrupt.
  void Run(const std::function<bool()>& should_yield);

  // For the thread that waits for Run.
  bool finished() const { return cancelled_ || found_corrupt() || advanced_ == composition_.layers.size(); }
  std::vector<bool> corrupt() const;  // one per source; all false until it has finished
  bool cancelled() const { return cancelled_; }
  bool refused() const { return refused_; }     // the GPU has no memory for the rest
  bool wrote() const { return advanced_ > 0; }  // some of the states
  void ReleaseMemory() { composition_.keep.reset(); }

 private:
  struct Source {
    ComposeSource object;
    ObjectBytes bytes;
  };

  bool found_corrupt() const { return verified_ == composition_.layers.size() && !corrupt_.empty(); }
  void VerifyLayer(size_t layer, GpuCalls* calls);
  bool Verify(std::span<PartCheck> checks, std::span<PartCheck> on_gpu, GpuCalls* calls) const;
  bool Prepare(GpuCalls& calls) const;
  void Advance(const Composition::Layer& layer, GpuCalls* calls) const;
  void Advance(const Composition::Layer& layer, std::span<const kernels::TupleView> tuples,
               const kernels::Kernels& kernels, kernels::Queue& queue, const float* decays) const;

  const kernels::Kernels& kernels_;
  kernels::Workers& workers_;
  GpuLane* const gpu_;
  Composition composition_;
  const CancelFlag cancel_;
  std::vector<Source> sources_;
  size_t verified_ = 0, advanced_ = 0;                // layers
  absl::flat_hash_set<const ObjectHeader*> corrupt_;  // looked up, never iterated
  bool cancelled_ = false, refused_ = false;
};

}  // namespace ashlar::storage
