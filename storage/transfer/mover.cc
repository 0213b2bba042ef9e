// SPDX-License-Identifier: Apache-2.0
#include "storage/transfer/mover.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "storage/transfer/publish_job.h"

namespace ashlar::storage {

struct Mover::LandingCopy {
  const TenantId tenant;
  LandJob job;
  LandingOwner* owner;
  std::vector<bool> reported_corrupt;  // by source; also for sources that will not arrive
  uint32_t reported_layers = 0;
  std::atomic<bool> posted{false};  // a report waits for the metadata thread
  bool blocked = false;

  // On the metadata thread: reports what has happened since the last report. Once a landing is over, `Ended` reports
  // its last layers: the engine gets one message for both.
  void Report(bool over) {
    posted = false;
    const uint32_t layers = job.layers();
    for (size_t i = 0; i < reported_corrupt.size(); ++i) {
      if (!job.corrupt(i) || reported_corrupt[i]) continue;
      reported_corrupt[i] = true;
      owner->Corrupt(i);
    }
    if (layers == reported_layers || job.cancelled() || over) return;
    reported_layers = layers;
    owner->Landed(layers);
  }

  void Finish(MissReason outcome) {
    job.ReleaseMemory();
    owner->Ended(outcome);
  }
};

Mover::Mover(const kernels::Kernels& kernels, kernels::Workers& workers, Executor& executor, const Tier& tier,
             uint64_t turn_bytes, std::vector<GpuLane*> gpus)
    : kernels_(kernels),
      workers_(workers),
      executor_(executor),
      tier_(tier),
      turn_bytes_(turn_bytes),
      gpus_(std::move(gpus)) {}

GpuLane* Mover::LaneOf(const kernels::Gpu* gpu) const {
  const auto found = std::ranges::find_if(gpus_, [gpu](const GpuLane* lane) { return &lane->gpu() == gpu; });
  return found == gpus_.end() ? nullptr : *found;
}

bool Mover::Publish(const ObjectHeader& plan, const Slot& slot, PublishSource source, CancelFlag cancel,
                    std::function<void(std::optional<ObjectHeader>)> done, const Tier* tier) {
  GpuLane* const gpu = LaneOf(GpuOf(source));
  auto job = std::make_shared<PublishJob>(kernels_, workers_, tier == nullptr ? tier_ : *tier, gpu, plan, slot,
                                          std::move(source), std::move(cancel));
  return executor_.Run(
      slot.tenant, [job] { job->Run(); }, [job, done = std::move(done)] { done(job->Finish()); });
}

void Mover::Land(TenantId tenant, std::vector<LandSource> sources, LandTarget target, CancelFlag cancel,
                 LandingOwner& owner) {
  const kernels::Gpu* gpu = GpuOf(target);
  for (LandSource& source : sources) {
    if (source.tier == nullptr) source.tier = &tier_;
    if (gpu == nullptr) gpu = source.tier->gpu();
  }
  NextTurn(std::shared_ptr<LandingCopy>(
      new LandingCopy{.tenant = tenant,
                      .job = LandJob(kernels_, workers_, LaneOf(gpu), sources, std::move(target), std::move(cancel)),
                      .owner = &owner,
                      .reported_corrupt = std::vector<bool>(sources.size())}));
}

bool Mover::Compose(TenantId tenant, std::vector<ComposeSource> sources, Composition composition, CancelFlag cancel,
                    ComposeDone done) {
  for (ComposeSource& source : sources) {
    if (source.tier == nullptr) source.tier = &tier_;
  }
  GpuLane* const gpu = LaneOf(composition.gpu);
  auto job = std::make_shared<ComposeJob>(kernels_, workers_, gpu, std::move(sources), std::move(composition),
                                          std::move(cancel));
  return NextLayers({tenant, std::move(job), std::make_shared<const ComposeDone>(std::move(done))});
}

bool Mover::NextLayers(const Composing& composing) {
  const auto should_yield = [this, tenant = composing.tenant] { return executor_.ShouldYield(tenant); };
  return executor_.Run(
      composing.tenant, [job = composing.job, should_yield] { job->Run(should_yield); },
      [this, composing] {
        ComposeJob& job = *composing.job;
        MissReason outcome = job.cancelled() ? MissReason::kCancelled : MissReason::kNone;
        if (!job.finished()) {
          if (!job.refused() && NextLayers(composing)) return;
          // A job that has written can only say that it ended in the middle.
          outcome = job.wrote() ? MissReason::kCancelled : MissReason::kBusy;
        }
        job.ReleaseMemory();
        (*composing.done)(job.corrupt(), outcome);
      });
}

size_t Mover::StepsThere(const std::shared_ptr<LandingCopy>& landing) {
  size_t end = SIZE_MAX, last = 0;
  for (size_t i = 0; i < landing->reported_corrupt.size(); ++i) {
    if (landing->reported_corrupt[i]) continue;
    const std::optional<uint64_t> loaded = landing->owner->Loaded(i);
    if (!loaded) {
      landing->reported_corrupt[i] = true;
      landing->job.Skip(i);
      continue;
    }
    const size_t next = landing->job.FirstStepAfter(i, *loaded);
    if (next >= end) continue;
    end = next;
    last = i;
  }
  if (landing->job.CanRun(end)) return end;
  landing->blocked = true;
  landing->owner->WhenLoaded(last, landing->job.NextNeeds(last), [this, landing] {
    if (std::exchange(landing->blocked, false)) NextTurn(landing);
  });
  return 0;
}

void Mover::NextTurn(const std::shared_ptr<LandingCopy>& landing) {
  if (landing->job.cancelled()) return landing->Finish(MissReason::kCancelled);
  if (landing->job.finished()) return landing->Finish(MissReason::kNone);
  const size_t end = StepsThere(landing);
  if (end == 0) return;
  const auto post = [this, landing] {
    if (!landing->posted.exchange(true)) executor_.Post(landing->tenant, [landing] { landing->Report(false); });
  };
  const auto should_yield = [this, tenant = landing->tenant] { return executor_.ShouldYield(tenant); };
  const bool queued = executor_.Run(
      landing->tenant,
      [this, landing, post, should_yield, end] { landing->job.Run(turn_bytes_, end, post, should_yield); },
      [this, landing] {
        landing->Report(landing->job.finished());
        NextTurn(landing);
      });
  if (!queued) landing->Finish(MissReason::kBusy);
}

}  // namespace ashlar::storage
