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

// The client of a landing that the mover executes. All calls are on the metadata thread.
class LandingOwner {
 public:
  virtual ~LandingOwner() = default;
  // Returns how many bytes of a source are available, from its start: its copy may still be in promotion. Empty: the
  // rest will not arrive, and the source is skipped.
  virtual std::optional<uint64_t> Loaded(size_t source) = 0;
  // The landing cannot continue before that number of bytes of the source is available. Calls `resume` then, or when
  // `Loaded` becomes empty, or when the landing is cancelled. Repeated calls of `resume` do no harm.
  virtual void WhenLoaded(size_t source, uint64_t bytes, std::function<void()> resume) = 0;
  // That number of attention layers has landed for all sources. For the last ones, `Ended` is called instead.
  virtual void Landed(uint32_t attention_layers) = 0;
  // The source failed its checksum; the rest of it is skipped.
  virtual void Corrupt(size_t source) = 0;
  // The last call. The outcome of all sources except the corrupt ones: kNone (landed), kCancelled, or kBusy (the
  // executor was full).
  virtual void Ended(MissReason outcome) = 0;
};

// The bytes that a landing moves per turn. Moving them takes much longer than the wait of the threads for each other at
// the end of a turn, and is the longest time that one landing delays the next.
inline constexpr uint64_t kTurnBytes = 256 << 20;

// Sources and targets must fit (storage/transfer/transfer.h): bytes in a GPU's memory move only to and from memory of
// the same GPU or of the CPU. A transfer releases `keep` before its last call.
class Mover {
 public:
  // All arguments must outlive the mover, and the mover everything in flight. `workers` may be used by several executor
  // threads at a time. `tier` holds the slots that name no tier. `gpus`: one for each GPU with engines' memory; each
  // must reach the tiers in CPU memory.
  Mover(const kernels::Kernels& kernels, kernels::Workers& workers, Executor& executor, const Tier& tier,
        uint64_t turn_bytes = kTurnBytes, std::vector<GpuLane*> gpus = {});

  // Fills the slot: the parts, each hashed while it is copied, then the header at the object's start. `done` receives
  // the header with its checksums, or nothing if the publish was cancelled; the slot must stay until then. Returns
  // false, and calls nothing, if the executor is full. `tier` has the slot; null: the mover's.
  bool Publish(const ObjectHeader& plan, const Slot& slot, PublishSource source, CancelFlag cancel,
               std::function<void(std::optional<ObjectHeader>)> done, const Tier* tier = nullptr);

  // Lands keys and values layer by layer, for each layer those of all sources. Verifies them, and the tuples of the
  // linear layers before it (after the last one: at the end), against the checksums in the headers. An executor item
  // takes as many whole layers as make a turn, and the next is queued when it ends. `owner` must stay until `Ended`.
  void Land(TenantId tenant, std::vector<LandSource> sources, LandTarget target, CancelFlag cancel,
            LandingOwner& owner);

  // Composes layer by layer, in as few executor items as other tenants' work allows. One source for each interior.
  // `done` receives the corrupt ones; if there are any, or if the composition was cancelled before it began, nothing
  // was written. `outcome`: kNone, kCancelled (possibly in the middle), or kBusy (it yielded before it had written
  // anything, and the executor was full; or the GPU has no memory for it). Returns false, and calls nothing, if the
  // executor is full.
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
  GpuLane* LaneOf(const kernels::Gpu* gpu) const;  // null: of none
  // Returns the step up to which all sources are available; 0: none can run, and the owner resumes the landing later.
  size_t StepsThere(const std::shared_ptr<LandingCopy>& landing);

  const kernels::Kernels& kernels_;
  kernels::Workers& workers_;
  Executor& executor_;
  const Tier& tier_;
  const uint64_t turn_bytes_;
  const std::vector<GpuLane*> gpus_;
};

}  // namespace ashlar::storage
