// SPDX-License-Identifier: Apache-2.0
// Router: distributes the cold segments of a prompt over several engines (HYPIC §4.4).
//
// An engine that misses segments requests a plan. Some segments remain with this engine; the others are assigned to
// engines that offer prefill, on this and other nodes. An engine on this node publishes into this node's cache. An
// engine elsewhere publishes on its own node, which answers with the leased object; this node adopts it and starts
// loading it immediately, while the other engine computes the next segment. The requesting engine looks up again and
// finds ordinary hits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/observe/router_metrics.h"
#include "daemon/router/cold_segment.h"
#include "daemon/router/elsewhere.h"
#include "daemon/router/lpt.h"
#include "daemon/router/prefill_backlog.h"
#include "daemon/router/prefill_for_nodes.h"
#include "daemon/router/prefill_workers.h"
#include "daemon/router/prompt_probe.h"
#include "daemon/router/segment_holds.h"
#include "daemon/router/worker_choice.h"
#include "daemon/runtime/event_loop.h"
#include "storage/cache.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// The state of one segment of a plan. The numbers are sent on the wire (cache.proto).
enum class PlannedSegmentState : uint8_t {
  kPending = 1,   // another engine computes it
  kPresent = 2,   // a lookup finds it
  kFallback = 3,  // the requesting engine computes it; in a warm-up, no engine does
  kRefused = 4,   // only in a warm-up: each engine that was asked can never compute it
};

// The metadata thread only.
class Router {
 public:
  struct Options {
    double patience = 4;                            // multiple of the expected time of an assignment
    storage::Nanos least_patience = 2'000'000'000;  // minimum margin over the expected time
    uint32_t tries = 3;  // workers that are tried before the requesting engine gets the segment
    size_t plans_of_a_session = 64;
    // assignments per node at a time, because a node's connection also carries other calls
    size_t given_to_a_node = 24;
    storage::Nanos drop_after = 120'000'000'000;  // plans and failures that no caller asks about are dropped then
    size_t tenants = 1;                           // tenants of this node, which share the worker table
    std::string node;                             // its name in the cluster; empty without one

    static Options From(const v1::Config& config);  // `config` must come from ParseConfig
  };
  struct Planned {
    uint64_t plan = 0;  // 0: the requesting engine computes everything
    std::vector<bool> elsewhere;
    storage::Nanos expected = 0;
  };

  // All must outlive the object.
  Router(const storage::Clock& clock, storage::Cache& cache, const Options& options);
  // Call once, before any plan. Null outside a cluster.
  void Attach(PrefillElsewhere* elsewhere);

  // All of `cold` must be of one namespace. RESOURCE_EXHAUSTED if the session has too many plans.
  void Plan(const PlanAsker& asker, std::vector<ColdSegment> cold, std::function<void(absl::StatusOr<Planned>)> done);
  // Answers when a segment falls back to the requesting engine or none is pending, at the latest after `wait`.
  // NOT_FOUND for a plan of another session.
  using States = std::vector<PlannedSegmentState>;
  void Await(storage::SessionId session, uint64_t plan, storage::Nanos wait,
             std::function<void(absl::StatusOr<States>)> done);
  // Releases what the plan holds. Work for this plan alone is cancelled.
  void End(storage::SessionId session, uint64_t plan);

  // Requests the computation of missing objects without an engine that waits, and answers immediately with the state of
  // each. Started work continues; its results are cached like other objects. A failure is reported by one call, which
  // does not start the object again.
  void Warm(storage::TenantId tenant, std::vector<ColdSegment> cold, std::function<void(absl::StatusOr<States>)> done);

  // An engine of this node is about to reserve the key: releases the space reserved for the segment.
  void YieldSpace(storage::TenantId tenant, const Key& key);

  PrefillWorkers& workers() { return workers_; }
  PrefillBacklog& backlog() { return backlog_; }
  PrefillForNodes& for_nodes() { return for_nodes_; }
  ClusterProber& probes() { return probes_; }

  void SessionEnded(storage::SessionId session);
  void Tick();                  // call many times per second
  void RunOn(EventLoop& loop);  // lets the metadata thread call Tick
  // Answers all waiting calls and releases what is held. No work is accepted afterwards.
  void Stop();
  void StopOn(EventLoop& loop);  // lets the metadata thread call Stop, and waits; not on that thread
  RouterFigures figures() const;

 private:
  struct Task : SegmentToAssign {
    PlannedSegmentState state = PlannedSegmentState::kPending;
    uint64_t attempt = 0;  // counter; replies to earlier attempts are late
    uint32_t tries = 0, refusals = 0;
    bool assigned = false;  // otherwise it waits for a worker to be chosen
    WorkerPlace place;
    uint64_t local = 0;                // number of the local assignment
    storage::Nanos deadline = 0;       // deadline of the attempt
    storage::LeaseId lease{};          // keeps the object here until the plans have ended
    storage::ReservationId space = 0;  // reserved space in this node's memory until the object arrives; 0 for none
    std::set<uint64_t> plans;
  };
  struct OpenPlan {
    PlanAsker asker;
    std::vector<std::shared_ptr<Task>> tasks;  // null: assigned to the requesting engine from the start
    std::vector<bool> reported;                // the fallback to the requesting engine was reported
    storage::Nanos asker_free_at = 0, asked_at = 0;
    std::function<void(absl::StatusOr<States>)> waiting;
    storage::Nanos waits_until = 0;
  };
  using Tasks = std::vector<std::shared_ptr<Task>>;

  static WorkerChoice::Segments SegmentsOf(const Tasks& tasks);
  void Open(const PlanAsker& asker, const Tasks& tasks, const LptPlan& chosen, const std::vector<WorkerPlace>& places,
            const std::function<void(absl::StatusOr<Planned>)>& done);
  void Assign(const std::shared_ptr<Task>& task, const WorkerPlace& place, storage::Nanos ends_in);
  void Answered(const std::shared_ptr<Task>& task, uint64_t attempt, const absl::Status& status);
  void Arrived(const std::shared_ptr<Task>& task);
  void Failed(const std::shared_ptr<Task>& task);
  void Retry();
  void Settle(const std::shared_ptr<Task>& task, PlannedSegmentState state);
  void Withdraw(Task& task);
  bool Report(OpenPlan& plan, bool over);
  void EndWarmUp(uint64_t plan);

  struct FailedWarmUp {
    PlannedSegmentState state = PlannedSegmentState::kFallback;
    storage::Nanos at = 0;
  };

  static constexpr storage::SessionId kNoSession = 0;  // engine sessions count from 1

  const storage::Clock& clock_;
  storage::Cache& cache_;
  const Options options_;
  PrefillWorkers workers_;
  PrefillBacklog backlog_;
  WorkerChoice choice_;
  SegmentHolds holds_;
  PrefillForNodes for_nodes_;
  ClusterProber probes_;
  std::map<uint64_t, OpenPlan> plans_;
  std::multiset<storage::SessionId> choosing_;  // sessions of plans whose workers are being chosen
  std::map<std::pair<storage::TenantId, Key>, std::shared_ptr<Task>> tasks_;   // pending tasks
  std::map<std::pair<storage::TenantId, Key>, FailedWarmUp> failed_warm_ups_;  // not reported yet
  uint64_t next_plan_ = 1, next_attempt_ = 1;
  bool retrying_ = false, stopped_ = false;
  RouterFigures figures_;  // without the values computed on request
};

}  // namespace ashlar::daemon
