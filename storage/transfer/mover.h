// SPDX-License-Identifier: Apache-2.0
// Mover: moves bytes between engines' memory and objects. Kernels copy, rotate and hash them in one pass, on the
// injected executor, parallel over the given workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/kernels.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/tier/tier.h"
#include "storage/transfer/cancel_flag.h"
#include "storage/transfer/compose_job.h"
#include "storage/transfer/composition.h"
#include "storage/transfer/gpu_lane.h"
#include "storage/transfer/land_job.h"
#include "storage/transfer/transfer.h"

namespace ashlar::storage {

// Called on the metadata thread.
struct LandEvents {
  // Returns how many bytes of a source are loaded, from its start. Empty: it will never be complete and is skipped.
  // Must be set unless all sources are complete.
  std::function<std::optional<uint64_t>(size_t source)> loaded;
  // The landing needs that many bytes of the source. Call `resume` when they are loaded, when `loaded` becomes empty,
  // or when the landing was cancelled; calling it more than once has no effect.
  std::function<void(size_t source, uint64_t bytes, std::function<void()> resume)> blocked;
  std::function<void(uint32_t attention_layers)> progress;  // landed for all sources; `done` covers the last ones
  std::function<void(size_t source)> corrupt;               // wrong checksum; the rest of the source is skipped
  // The last call, made once. The outcome of all sources except corrupt ones: kNone (landed), kCancelled, or kBusy (the
  // executor was full).
  std::function<void(MissReason outcome)> done;
};

// Bytes that a landing moves before another has its turn. Large compared with what threads lose when they wait for each
// other at the end of a turn; a landing waits at most this long for each one before it.
inline constexpr uint64_t kTurnBytes = 256 << 20;

// Sources and targets must fit (storage/transfer/transfer.h): GPU memory is copied only from and to memory of the same
// GPU or host memory. A transfer releases `keep` before its `done`.
class Mover {
 public:
  // All must outlive the mover, and the mover everything in flight. `workers` are used by one or several executor
  // threads at a time, as they allow. `tier` is the default for slots. `gpus` has one entry per GPU with engines'
  // memory; each must be able to access the host memory tiers.
  Mover(const kernels::Kernels& kernels, kernels::Workers& workers, Executor& executor, const Tier& tier,
        uint64_t turn_bytes = kTurnBytes, std::vector<GpuLane*> gpus = {});

  // Fills the slot: the parts, each hashed while it is copied, then the header. `done` gets the header with its
  // checksums, or nothing when cancelled. The slot must stay until then. Returns false, calling nothing, if the
  // executor is full. `tier` is the slot's; null: the mover's.
  bool Publish(const ObjectHeader& plan, const Slot& slot, PublishSource source, CancelFlag cancel,
               std::function<void(std::optional<ObjectHeader>)> done, const Tier* tier = nullptr);

  // Lands keys and values layer by layer, for all sources, and verifies them and the tuples of the preceding linear
  // layers (those after the last attention layer at the end) against the checksums in the headers. An executor item
  // takes as many whole layers as make a turn, and queues the next one.
  void Land(TenantId tenant, std::vector<LandSource> sources, LandTarget target, CancelFlag cancel, LandEvents events);

  // Composes layer by layer, in as few executor items as other work permits. One source per interior. `done` reports
  // corrupt sources; in that case, or if it was cancelled before, nothing was written. `outcome`: kNone, kCancelled
  // (possibly halfway), or kBusy (it yielded before writing anything and the executor was then full, or the GPU has no
  // memory). Returns false, calling nothing, if the executor is full.
  using ComposeDone = std::function<void(std::vector<bool> corrupt, MissReason outcome)>;
  bool Compose(TenantId tenant, std::vector<ComposeSource> sources, Composition composition, CancelFlag cancel,
               ComposeDone done);

 private:
  struct Composing {
    TenantId tenant;
    std::shared_ptr<ComposeJob> job;
    std::shared_ptr<const ComposeDone> done;
  };
  bool NextLayers(const Composing& composing);
  struct LandingCopy;
  void NextTurn(const std::shared_ptr<LandingCopy>& landing);
  // Returns the step up to which all sources are loaded. If none can run, `blocked` was called.
  size_t StepsThere(const std::shared_ptr<LandingCopy>& landing);

  const kernels::Kernels& kernels_;
  kernels::Workers& workers_;
  Executor& executor_;
  const Tier& tier_;
  GpuLane* LaneOf(const kernels::Gpu* gpu) const;  // null without one

  const uint64_t turn_bytes_;
  const std::vector<GpuLane*> gpus_;
};

}  // namespace ashlar::storage
