// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/router.h"

#include <algorithm>
#include <future>
#include <utility>

#include "ashlar/v1/cache.pb.h"
#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kTickEvery = 5'000'000;

}  // namespace

Router::Router(const storage::Clock& clock, storage::Cache& cache, const Options& options)
    : clock_(clock),
      cache_(cache),
      options_(options),
      workers_(clock, options.tenants),
      backlog_(clock),
      choice_(workers_, options.given_to_a_node),
      holds_(cache),
      for_nodes_(clock, cache, workers_),
      probes_(options.node) {}

void Router::Attach(PrefillElsewhere* elsewhere) {
  choice_.Attach(elsewhere);
  probes_.Attach(elsewhere);
}

WorkerChoice::Segments Router::SegmentsOf(const Tasks& tasks) {
  return {tasks.begin(), tasks.end()};
}

Router::Options Router::Options::From(const v1::Config& config) {
  const v1::Prefill& prefill = config.prefill();
  return {.patience = static_cast<double>(prefill.patience()),
          .least_patience = storage::Nanos{1'000'000} * prefill.min_patience_milliseconds(),
          .tries = prefill.tries(),
          .given_to_a_node = prefill.segments_per_node(),
          .tenants = static_cast<size_t>(config.tenants_size()),
          .node = config.cluster().node()};
}

void Router::Plan(const PlanAsker& asker, std::vector<ColdSegment> cold,
                  std::function<void(absl::StatusOr<Planned>)> done) {
  if (stopped_) return done(absl::UnavailableError("the daemon is stopping"));
  const auto of_session =
      std::ranges::count_if(plans_, [&](const auto& plan) { return plan.second.asker.session == asker.session; });
  if (static_cast<size_t>(of_session) + choosing_.count(asker.session) >= options_.plans_of_a_session) {
    return done(absl::ResourceExhaustedError("the session has too many open plans"));
  }
  Tasks tasks;
  for (ColdSegment& one : cold) {
    const auto known = tasks_.find({one.work.tenant, one.work.key});
    if (known != tasks_.end()) {
      tasks.push_back(known->second);  // already being computed
      continue;
    }
    auto task = std::make_shared<Task>();
    task->cold = std::move(one);
    tasks.push_back(std::move(task));
  }
  choosing_.insert(asker.session);
  choice_.Choose(
      asker, 0, SegmentsOf(tasks),
      [this, asker, tasks, done = std::move(done)](const LptPlan& chosen, const std::vector<WorkerPlace>& places) {
        const auto asked = choosing_.find(asker.session);
        if (asked == choosing_.end()) return done(absl::CancelledError("the session has ended"));
        choosing_.erase(asked);
        Open(asker, tasks, chosen, places, done);
      });
}

void Router::Open(const PlanAsker& asker, const Tasks& tasks, const LptPlan& chosen,
                  const std::vector<WorkerPlace>& places, const std::function<void(absl::StatusOr<Planned>)>& done) {
  if (stopped_) return done(absl::UnavailableError("the daemon is stopping"));
  Planned planned{.elsewhere = std::vector<bool>(tasks.size(), false), .expected = chosen.ends_at};
  ++figures_.planned;
  const storage::Nanos now = clock_.Now();
  const uint64_t id = next_plan_++;
  OpenPlan plan{.asker = asker, .tasks = Tasks(tasks.size()), .reported = std::vector<bool>(tasks.size(), true)};
  plan.asked_at = now;
  plan.asker_free_at = now;
  std::vector<std::pair<std::shared_ptr<Task>, size_t>> assigned;
  // In the order of completion: a worker computes its segments in the order of assignment.
  std::vector<size_t> order(tasks.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](size_t i) { return chosen.ends[i]; });
  for (const size_t i : order) {
    std::shared_ptr<Task> task = tasks[i];
    // Another plan may have come in between: it is the same segment.
    const auto known = tasks_.find({task->cold.work.tenant, task->cold.work.key});
    if (known != tasks_.end()) task = known->second;
    if (known == tasks_.end() && task->state != PlannedSegmentState::kPending) {  // it has ended meanwhile
      const auto fresh = std::make_shared<Task>();
      fresh->cold = task->cold;
      task = fresh;
    }
    const size_t worker = chosen.worker[i];
    const bool others = worker != 0 && worker != LptPlan::kUnassigned;
    if (known == tasks_.end() && !(others && holds_.ReserveSpace(task->cold, task->space))) {
      ++figures_.own_segments;
      if (worker == 0) plan.asker_free_at = std::max(plan.asker_free_at, now + chosen.ends[i]);
      continue;
    }
    plan.tasks[i] = task;
    plan.reported[i] = false;
    planned.elsewhere[i] = true;
    task->plans.insert(id);
    if (known != tasks_.end()) continue;
    tasks_[{task->cold.work.tenant, task->cold.work.key}] = task;
    assigned.emplace_back(task, i);
    ++(places[worker - 1].remote ? figures_.elsewhere_segments : figures_.here_segments);
  }
  if (std::ranges::count(planned.elsewhere, true) == 0) {
    ++figures_.alone;
    return done(planned);
  }
  planned.plan = id;
  plans_.emplace(id, std::move(plan));
  for (const auto& [task, i] : assigned) Assign(task, places[chosen.worker[i] - 1], chosen.ends[i]);
  done(planned);
}

void Router::Assign(const std::shared_ptr<Task>& task, const WorkerPlace& place, storage::Nanos ends_in) {
  const double expected_nanos = options_.patience * static_cast<double>(ends_in);
  const auto expected = static_cast<storage::Nanos>(std::min(expected_nanos, static_cast<double>(kLongestCompute)));
  const storage::Nanos patience = options_.least_patience + expected;
  const uint64_t attempt = next_attempt_++;
  task->attempt = attempt;
  ++task->tries;
  task->assigned = true;
  task->place = place;
  task->deadline = clock_.Now() + patience;
  task->local = 0;
  const auto done = [this, task, attempt](const absl::Status& status) { Answered(task, attempt, status); };
  if (place.remote) {
    choice_.AssignElsewhere(place, task->cold.work, patience, done);
    return;
  }
  const uint64_t local = workers_.Assign(place.worker, task->cold.work, task->deadline, done);
  if (task->attempt == attempt && task->state == PlannedSegmentState::kPending) task->local = local;
  if (local == 0) Failed(task);
}

void Router::Answered(const std::shared_ptr<Task>& task, uint64_t attempt, const absl::Status& status) {
  if (task->attempt != attempt || task->state != PlannedSegmentState::kPending) {
    ++figures_.late;
    return;
  }
  if (absl::IsOutOfRange(status)) ++task->refusals;
  if (!status.ok()) return Failed(task);
  holds_.ReleaseSpace(task->cold.work.tenant, task->space);  // the lookup reserves it again
  const auto loaded = [this, task, attempt](bool whole) {
    if (task->attempt != attempt || task->state != PlannedSegmentState::kPending) return;
    if (whole) {
      Arrived(task);
    } else {
      Failed(task);
    }
  };
  if (!holds_.Lease(task->cold, task->lease, loaded)) Failed(task);
}

void Router::Arrived(const std::shared_ptr<Task>& task) {
  ++figures_.arrived;
  Settle(task, PlannedSegmentState::kPresent);
}

// The attempt has ended without a result: others get the segment in the next Tick.
void Router::Failed(const std::shared_ptr<Task>& task) {
  ++figures_.failed;
  Withdraw(*task);
  holds_.EndLease(task->cold.work.tenant, task->lease);
  task->failed.insert(task->place);
  task->assigned = false;
  task->attempt = next_attempt_++;
}

void Router::Withdraw(Task& task) {
  if (task.local != 0) workers_.Withdraw(std::exchange(task.local, 0));
}

// Assigns segments that wait for a worker. Each plan's segments are assigned together, so that the plan's requester may
// get some.
void Router::Retry() {
  if (retrying_) return;
  std::map<uint64_t, Tasks> waiting;  // waiting tasks, by one of the plans that want them
  Tasks abandoned;
  for (const auto& [key, task] : tasks_) {
    if (task->assigned) continue;
    if (task->tries >= options_.tries || task->plans.empty()) {
      abandoned.push_back(task);
    } else {
      waiting[*task->plans.begin()].push_back(task);
    }
  }
  for (const auto& task : abandoned) {
    figures_.given_back += task->plans.empty() ? 0 : 1;
    Settle(task, PlannedSegmentState::kFallback);
  }
  if (waiting.empty()) return;
  const auto [id, tasks] = *waiting.begin();  // one plan per turn: the next one sees what this one has taken
  const auto plan = plans_.find(id);
  if (plan == plans_.end()) return;
  retrying_ = true;
  const storage::Nanos ready_in = plan->second.asker_free_at - clock_.Now();
  choice_.Choose(
      plan->second.asker, ready_in, SegmentsOf(tasks),
      [this, id = id, tasks = tasks](const LptPlan& chosen, const std::vector<WorkerPlace>& places) {
        retrying_ = false;
        if (stopped_) return;
        for (size_t i = 0; i < tasks.size(); ++i) {
          if (tasks[i]->state != PlannedSegmentState::kPending || tasks[i]->assigned) continue;
          const size_t worker = chosen.worker[i];
          if (worker != 0 && worker != LptPlan::kUnassigned && holds_.ReserveSpace(tasks[i]->cold, tasks[i]->space)) {
            Assign(tasks[i], places[worker - 1], chosen.ends[i]);
            continue;
          }
          ++figures_.given_back;
          if (const auto asked = plans_.find(id); asked != plans_.end()) {
            asked->second.asker_free_at = clock_.Now() + chosen.ends[i];
          }
          Settle(tasks[i], PlannedSegmentState::kFallback);
        }
      });
}

void Router::Settle(const std::shared_ptr<Task>& task, PlannedSegmentState state) {
  task->state = state;
  holds_.ReleaseSpace(task->cold.work.tenant, task->space);
  tasks_.erase({task->cold.work.tenant, task->cold.work.key});
  const std::set<uint64_t> plans = task->plans;  // a callback may end some
  for (const uint64_t id : plans) {
    const auto plan = plans_.find(id);
    if (plan == plans_.end()) continue;
    if (plan->second.asker.session == kNoSession && state == PlannedSegmentState::kFallback) {
      const bool refused = task->tries > 0 && task->refusals == task->tries;
      failed_warm_ups_[{task->cold.work.tenant, task->cold.work.key}] = {
          .state = refused ? PlannedSegmentState::kRefused : state, .at = clock_.Now()};
    }
    Report(plan->second, /*over=*/false);
    EndWarmUp(id);
  }
  if (task->plans.empty()) holds_.EndLease(task->cold.work.tenant, task->lease);
}

// Answers a waiting Await if a segment fell back to the asker, no segment is pending, or the wait timed out (`over`).
// Returns whether it answered.
bool Router::Report(OpenPlan& plan, bool over) {
  if (!plan.waiting) return false;
  bool pending = false, news = false;
  States states;
  for (size_t i = 0; i < plan.tasks.size(); ++i) {
    states.push_back(plan.tasks[i] == nullptr ? PlannedSegmentState::kFallback : plan.tasks[i]->state);
    pending |= states.back() == PlannedSegmentState::kPending;
    news |= states.back() == PlannedSegmentState::kFallback && !plan.reported[i];
  }
  if (pending && !news && !over) return false;
  for (size_t i = 0; i < states.size(); ++i)
    plan.reported[i] = plan.reported[i] || states[i] == PlannedSegmentState::kFallback;
  plan.asked_at = clock_.Now();
  std::exchange(plan.waiting, nullptr)(std::move(states));
  return true;
}

void Router::Await(storage::SessionId session, uint64_t id, storage::Nanos wait,
                   std::function<void(absl::StatusOr<States>)> done) {
  const auto found = plans_.find(id);
  if (found == plans_.end() || found->second.asker.session != session) {
    return done(absl::NotFoundError("plan: unknown or ended"));
  }
  OpenPlan& plan = found->second;
  Report(plan, /*over=*/true);  // an earlier question still waits
  plan.waiting = std::move(done);
  plan.waits_until = clock_.Now() + wait;
  Report(plan, /*over=*/wait <= 0);
}

void Router::End(storage::SessionId session, uint64_t id) {
  const auto found = plans_.find(id);
  if (found == plans_.end() || found->second.asker.session != session) return;
  OpenPlan plan = std::move(found->second);
  plans_.erase(found);
  for (const std::shared_ptr<Task>& task : plan.tasks) {
    if (task == nullptr) continue;
    task->plans.erase(id);
    if (!task->plans.empty()) continue;
    if (task->state == PlannedSegmentState::kPending) {
      Withdraw(*task);
      holds_.ReleaseSpace(task->cold.work.tenant, task->space);
      task->attempt = next_attempt_++;  // results that come later are late
      tasks_.erase({task->cold.work.tenant, task->cold.work.key});
      task->state = PlannedSegmentState::kFallback;
    }
    holds_.EndLease(task->cold.work.tenant, task->lease);
  }
  if (plan.waiting) plan.waiting(absl::NotFoundError("plan: unknown or ended"));
}

void Router::YieldSpace(storage::TenantId tenant, const Key& key) {
  const auto task = tasks_.find({tenant, key});
  if (task != tasks_.end()) holds_.ReleaseSpace(tenant, task->second->space);
}

void Router::SessionEnded(storage::SessionId session) {
  workers_.SessionEnded(session);
  choosing_.erase(session);
  backlog_.SessionEnded(session);
  std::vector<uint64_t> ended;
  for (const auto& [id, plan] : plans_) {
    if (plan.asker.session == session) ended.push_back(id);
  }
  for (const uint64_t id : ended) End(session, id);
}

void Router::Tick() {
  if (stopped_) return;
  const storage::Nanos now = clock_.Now();
  workers_.Tick();
  std::vector<std::shared_ptr<Task>> overdue;
  for (const auto& [key, task] : tasks_) {
    if (task->assigned && task->deadline <= now) overdue.push_back(task);
  }
  for (const auto& task : overdue) Failed(task);
  Retry();
  std::vector<std::pair<storage::SessionId, uint64_t>> erased;
  for (auto& [id, plan] : plans_) {
    if (plan.waiting && plan.waits_until <= now) Report(plan, /*over=*/true);
    // A warm-up has no requester; it ends with its segments.
    if (plan.asker.session == kNoSession) continue;
    if (!plan.waiting && now - plan.asked_at > options_.drop_after) erased.emplace_back(plan.asker.session, id);
  }
  for (const auto& [session, id] : erased) End(session, id);
  std::erase_if(failed_warm_ups_, [&](const auto& failed) { return now - failed.second.at > options_.drop_after; });
}

void Router::RunOn(EventLoop& loop) {
  loop.Every(kTickEvery, [this] { Tick(); });
}

void Router::StopOn(EventLoop& loop) {
  std::promise<void> stopped;
  loop.PostCompletion(storage::kNoTenant, [&] { Stop(), stopped.set_value(); });
  stopped.get_future().wait();
}

void Router::Stop() {
  if (std::exchange(stopped_, true)) return;
  for_nodes_.Stop();
  probes_.Stop();
  std::vector<std::pair<storage::SessionId, uint64_t>> open;
  for (const auto& [id, plan] : plans_) open.emplace_back(plan.asker.session, id);
  for (const auto& [session, id] : open) End(session, id);
  workers_.Stop();
  holds_.Close();
}

RouterFigures Router::figures() const {
  const PrefillWorkers::Stats workers = workers_.stats();
  RouterFigures figures = figures_;
  figures.workers = workers.workers;
  figures.given = workers.given;
  figures.late += workers.late;
  figures.plans = plans_.size();
  figures.pending = tasks_.size();
  return figures;
}

}  // namespace ashlar::daemon
