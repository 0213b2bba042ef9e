// SPDX-License-Identifier: Apache-2.0
// Mover: moves bytes between engines' memory and objects. Kernels copy, rotate and hash them in one pass, on the
// injected executor, in parallel over the lent workers.
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
  // Returns how many bytes of a source are there, from its start: its copy may still be on its way up. None: it will
  // never be whole, and is skipped. Must be set if not all sources are whole.
  std::function<std::optional<uint64_t>(size_t source)> loaded;
  // The landing cannot continue before so many bytes of the source are there: call `resume` then, or when the answer of
  // `loaded` becomes none, or when the landing was cancelled. Calling it more than once does no harm.
  std::function<void(size_t source, uint64_t bytes, std::function<void()> resume)> blocked;
  std::function<void(uint32_t attention_layers)> progress;  // landed for all sources; `done` says it of the last ones
  std::function<void(size_t source)> corrupt;               // failed its checksum; the rest of it is skipped
  // The last call, made once. The outcome of all sources except the corrupt ones: kNone (landed), kCancelled, or kBusy
  // (the executor was full).
  std::function<void(MissReason outcome)> done;
};

// The bytes that a landing moves before another has its turn. They are many more than the threads lose when they wait
// for each other at the end of a turn; a landing still waits no longer than the time of this for each one before it.
inline constexpr uint64_t kTurnBytes = 256 << 20;

// Sources and targets must fit (storage/transfer/transfer.h): what lies in a GPU's memory moves to and from memory of
// the same GPU, or of the processor, alone. A transfer lets go of `keep` before its `done`.
class Mover {
 public:
  // All must outlive the mover, and the mover everything in flight. `workers` are used by one executor thread at a time
  // or by several, as they allow. `tier`: of slots that name none. `gpus`: one a GPU that engines' memory lies on; each
  // must reach the tiers of the processor's memory.
  Mover(const kernels::Kernels& kernels, kernels::Workers& workers, Executor& executor, const Tier& tier,
        uint64_t turn_bytes = kTurnBytes, std::vector<GpuLane*> gpus = {});

  // Fills the slot: parts, each hashed while it is copied, then the header at the object's start. `done` gets the
  // header with its checksums; nothing when cancelled. The slot stays until then. False, and nothing is called: the
  // executor is full. `tier`: the slot's; null: the mover's.
  bool Publish(const ObjectHeader& plan, const Slot& slot, PublishSource source, CancelFlag cancel,
               std::function<void(std::optional<ObjectHeader>)> done, const Tier* tier = nullptr);

  // Lands keys and values layer by layer, for each layer those of all sources, verifying them and the tuples of the
  // linear layers before it (behind the last one: at the end) against the checksums in the headers. An executor item
  // takes as many whole layers as make a turn; the next is queued when one is done.
  void Land(TenantId tenant, std::vector<LandSource> sources, LandTarget target, CancelFlag cancel, LandEvents events);

  // Composes layer by layer, in as few executor items as others leave room for. One source an interior; `done` learns
  // which of them are corrupt: then, and when it was cancelled before, nothing was written. `outcome`: kNone,
  // kCancelled (perhaps in the middle), or kBusy (it made way before it had written anything, and then the executor was
  // full; or the GPU has no memory for it). False, and nothing is called: the executor is full.
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
  // Up to which step all sources are there. None can run: `blocked` was told.
  size_t StepsThere(const std::shared_ptr<LandingCopy>& landing);

  const kernels::Kernels& kernels_;
  kernels::Workers& workers_;
  Executor& executor_;
  const Tier& tier_;
  GpuLane* LaneOf(const kernels::Gpu* gpu) const;  // null: of none

  const uint64_t turn_bytes_;
  const std::vector<GpuLane*> gpus_;
};

}  // namespace ashlar::storage
