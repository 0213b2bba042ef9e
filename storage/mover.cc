#include "storage/mover.h"

#include <utility>

#include "storage/publish_job.h"

namespace ashlar::storage {

struct Mover::Landing {
  LandJob job;
  LandEvents events;
  size_t sources;
  size_t step = 0;
  std::vector<bool> told_corrupt;

  void Finish(MissReason outcome) {
    job.ReleaseMemory();
    // The executor may drop its part of the landing on another thread: what the caller passed in ends here.
    const LandEvents last = std::exchange(events, {});
    last.done(outcome);
  }
};

Mover::Mover(const kernels::Kernels& kernels, kernels::Workers& workers, Executor& executor, const Tier& tier)
    : kernels_(kernels), workers_(workers), executor_(executor), tier_(tier) {}

bool Mover::Publish(const ObjectHeader& plan, const Slot& slot, PublishSource source, CancelFlag cancel,
                    std::function<void(std::optional<ObjectHeader>)> done) {
  auto job = std::make_shared<PublishJob>(kernels_, workers_, tier_, plan, slot, std::move(source), std::move(cancel));
  return executor_.Run([job] { job->Run(); }, [job, done = std::move(done)] { done(job->Finish()); });
}

void Mover::Land(std::vector<LandSource> sources, LandTarget target, CancelFlag cancel, LandEvents events) {
  auto landing = std::make_shared<Landing>(
      Landing{.job = LandJob(kernels_, workers_, tier_, sources, std::move(target), std::move(cancel)),
              .events = std::move(events),
              .sources = sources.size(),
              .told_corrupt = std::vector<bool>(sources.size())});
  NextStep(landing);
}

bool Mover::Compose(std::vector<ComposeSource> sources, Composition composition, CancelFlag cancel,
                    std::function<void(std::vector<bool>, bool)> done) {
  const size_t count = sources.size();
  auto job = std::make_shared<ComposeJob>(kernels_, workers_, tier_, std::move(sources), std::move(composition),
                                          std::move(cancel));
  return executor_.Run([job] { job->Run(); },
                       [job, count, done = std::move(done)] {
                         job->ReleaseMemory();
                         std::vector<bool> corrupt(count);
                         for (size_t i = 0; i < count; ++i) corrupt[i] = job->corrupt(i);
                         done(std::move(corrupt), job->cancelled());
                       });
}

void Mover::NextStep(const std::shared_ptr<Landing>& landing) {
  if (landing->job.cancelled()) return landing->Finish(MissReason::kCancelled);
  if (landing->step == landing->job.steps()) return landing->Finish(MissReason::kNone);
  const bool queued =
      executor_.Run([landing] { landing->job.RunStep(landing->step); }, [this, landing] { StepDone(landing); });
  if (!queued) landing->Finish(MissReason::kBusy);
}

void Mover::StepDone(const std::shared_ptr<Landing>& landing) {
  for (size_t i = 0; i < landing->sources; ++i) {
    if (!landing->job.corrupt(i) || landing->told_corrupt[i]) continue;
    landing->told_corrupt[i] = true;
    landing->events.corrupt(i);
  }
  ++landing->step;
  const bool landed_layer = landing->step <= landing->job.attention_layers() && !landing->job.cancelled();
  if (landed_layer) landing->events.progress(static_cast<uint32_t>(landing->step));
  NextStep(landing);
}

}  // namespace ashlar::storage
