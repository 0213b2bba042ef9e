// SPDX-License-Identifier: Apache-2.0
// Plans without a waiting requester: texts that engines compute in advance.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/router/router.h"

namespace ashlar::daemon {

void Router::Warm(storage::TenantId tenant, std::vector<ColdSegment> cold,
                  std::function<void(absl::StatusOr<States>)> done) {
  const auto states = std::make_shared<States>();
  const auto places = std::make_shared<std::vector<size_t>>();
  std::vector<ColdSegment> missing;
  for (ColdSegment& one : cold) {
    const bool here = !cache_.upkeep().inventory().Where(tenant, one.work.key, one.shard).empty();
    states->push_back(here ? PlannedSegmentState::kPresent : PlannedSegmentState::kPending);
    const auto failed = failed_warm_ups_.extract({tenant, one.work.key});
    if (here) continue;
    if (!failed.empty()) {
      states->back() = failed.mapped().state;
      continue;
    }
    if (tasks_.contains({tenant, one.work.key})) continue;
    places->push_back(states->size() - 1);
    missing.push_back(std::move(one));
  }
  if (missing.empty()) return done(*states);
  Plan({.session = kNoSession, .tenant = tenant, .computes = false}, std::move(missing),
       [this, states, places, done](const absl::StatusOr<Planned>& planned) {
         if (!planned.ok()) return done(planned.status());
         for (size_t i = 0; i < places->size(); ++i) {
           if (!planned->elsewhere[i]) (*states)[(*places)[i]] = PlannedSegmentState::kFallback;
         }
         EndWarmUp(planned->plan);
         done(*states);
       });
}

// A warm-up's plan ends with its last segment.
void Router::EndWarmUp(uint64_t id) {
  const auto plan = plans_.find(id);
  if (plan == plans_.end() || plan->second.asker.session != kNoSession) return;
  const bool pending = std::ranges::any_of(plan->second.tasks, [](const std::shared_ptr<Task>& task) {
    return task != nullptr && task->state == PlannedSegmentState::kPending;
  });
  if (!pending) End(kNoSession, id);
}

}  // namespace ashlar::daemon
