// SPDX-License-Identifier: Apache-2.0
// Router: has the cold segments of a prompt computed by several engines at once (HYPIC §4.4).
//
// An engine that misses segments asks for a plan. Some segments stay its own; the others are assigned to engines that
// offer prefill, here and on other nodes. An engine on this node publishes into this node's cache. One elsewhere
// publishes on its own node, which answers with the leased object; this node takes it in and brings it up at once,
// while the engine there computes its next one. The engine that asked looks up again, and finds ordinary hits.
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
#include "daemon/router/elsewhere.h"
#include "daemon/router/lpt.h"
#include "daemon/router/prefill_workers.h"
#include "daemon/runtime/event_loop.h"
#include "storage/cache.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// What became of one segment of a plan. The numbers travel (cache.proto).
enum class PrefillState : uint8_t {
  kPending = 1,  // somebody computes it
  kHere = 2,     // a look-up finds it
  kAskers = 3,   // the engine that asked computes it itself; of a warm-up: nobody does
};

// The metadata thread only.
class Router {
 public:
  struct Options {
    double patience = 4;                            // times what an assignment should take, and at least
    storage::Nanos least_patience = 2'000'000'000;  // so much longer than that
    uint32_t tries = 3;                             // workers that a segment is given to before its asker gets it
    size_t plans_of_a_session = 64;
    size_t given_to_a_node = 24;                  // at a time; a node's connection carries other calls, too
    storage::Nanos drop_after = 120'000'000'000;  // a plan that nobody asks about
    size_t tenants = 1;                           // of this node, which share its table of workers

    static Options From(const v1::Config& config);  // as ParseConfig accepted it
  };
  // A cold segment; `shard` and `bytes` as it would be stored (0: not known).
  struct Cold {
    PrefillWork work;
    TensorShard shard;
    uint64_t bytes = 0;
  };
  struct Asker {
    storage::SessionId session = 0;
    storage::TenantId tenant = 0;
    double tokens_per_second = 0;  // 0: it did not say
    bool computes = true;          // false: a warm-up, which only others compute
  };
  struct Planned {
    uint64_t plan = 0;  // 0: all is the asker's
    std::vector<bool> elsewhere;
    storage::Nanos expected = 0;
  };

  // All must outlive it.
  Router(const storage::Clock& clock, storage::Cache& cache, const Options& options)
      : clock_(clock), cache_(cache), options_(options), workers_(clock, options.tenants) {}
  // Once, before anybody asks; null: this node is alone.
  void Attach(PrefillElsewhere* elsewhere) { elsewhere_ = elsewhere; }

  // All of `cold` are of one namespace. RESOURCE_EXHAUSTED: the session has too many plans.
  void Plan(const Asker& asker, std::vector<Cold> cold, std::function<void(absl::StatusOr<Planned>)> done);
  // Answers as soon as a segment has become its asker's or none is pending, and otherwise after `wait`. NOT_FOUND for a
  // plan that is not this session's.
  using States = std::vector<PrefillState>;
  void Await(storage::SessionId session, uint64_t plan, storage::Nanos wait,
             std::function<void(absl::StatusOr<States>)> done);
  // Lets go what the plan keeps; nobody computes any more for it alone.
  void End(storage::SessionId session, uint64_t plan);

  // For nobody in particular: has computed what is not here, and answers at once how it stands with each. What was
  // started goes on, and is kept only as any object is.
  void Warm(storage::TenantId tenant, std::vector<Cold> cold, std::function<void(absl::StatusOr<States>)> done);

  // An engine of this node reserves that key now: the room that is held for the segment is for its object.
  void YieldRoom(storage::TenantId tenant, const Key& key);

  PrefillWorkers& workers() { return workers_; }
  // For another node: has it computed here. OK: it is in this node's cache.
  void PrefillFor(const std::string& node, uint64_t worker, PrefillWork work, storage::Nanos patience,
                  std::function<void(absl::Status)> done);
  void NodeGone(const std::string& node);

  void SessionEnded(storage::SessionId session);
  void Tick();                  // many times a second
  void RunOn(EventLoop& loop);  // has the metadata thread call it
  // Answers all who wait and gives back what is held; nothing is taken any more.
  void Stop();
  void StopOn(EventLoop& loop);  // has the metadata thread do so, and waits; not on that thread
  RouterFigures figures() const;

 private:
  struct Place {
    bool remote = false;
    uint64_t worker = 0;
    std::string node;
    auto operator<=>(const Place&) const = default;
  };
  struct Task {
    Cold cold;
    PrefillState state = PrefillState::kPending;
    uint64_t attempt = 0;  // counted; an answer to an earlier one is late
    uint32_t tries = 0;
    bool assigned = false;  // else it waits for a worker to be chosen
    Place place;
    uint64_t local = 0;           // the local assignment's number
    storage::Nanos deadline = 0;  // of the attempt
    std::set<Place> failed;
    storage::LeaseId lease{};         // keeps it here until the plans have ended
    storage::ReservationId room = 0;  // for it in this node's memory, until it comes; 0: none
    std::set<uint64_t> plans;
  };
  struct OpenPlan {
    Asker asker;
    std::vector<std::shared_ptr<Task>> tasks;  // null: the asker's from the start
    std::vector<bool> told;                    // that it is the asker's
    storage::Nanos asker_free_at = 0, asked_at = 0;
    std::function<void(absl::StatusOr<States>)> waiting;
    storage::Nanos waits_until = 0;
  };
  using Tasks = std::vector<std::shared_ptr<Task>>;

  void Choose(const Asker& asker, storage::Nanos asker_ready_in, const Tasks& tasks,
              std::function<void(const LptPlan&, const std::vector<Place>&)> done);
  void Open(const Asker& asker, const Tasks& tasks, const LptPlan& chosen, const std::vector<Place>& places,
            const std::function<void(absl::StatusOr<Planned>)>& done);
  void Assign(const std::shared_ptr<Task>& task, const Place& place, storage::Nanos ends_in);
  void Answered(const std::shared_ptr<Task>& task, uint64_t attempt, const absl::Status& status);
  void Arrived(const std::shared_ptr<Task>& task);
  void Failed(const std::shared_ptr<Task>& task);
  void Retry();
  void Settle(const std::shared_ptr<Task>& task, PrefillState state);
  void LetGo(const std::shared_ptr<Task>& task);
  bool TakeRoom(Task& task);  // false: there is none
  void GiveRoom(Task& task);
  void Withdraw(Task& task);
  bool Tell(OpenPlan& plan, bool over);
  void EndWarmUp(uint64_t plan);
  storage::SessionId SessionOf(storage::TenantId tenant);

  static constexpr storage::SessionId kNobody = 0;  // engines' sessions are counted from 1
  static constexpr storage::SessionId kFirstSession = (storage::SessionId{1} << 62) + (storage::SessionId{1} << 61);

  const storage::Clock& clock_;
  storage::Cache& cache_;
  const Options options_;
  PrefillWorkers workers_;
  PrefillElsewhere* elsewhere_ = nullptr;
  std::map<uint64_t, OpenPlan> plans_;
  std::multiset<storage::SessionId> choosing_;  // sessions of plans whose workers are being chosen
  std::map<std::pair<storage::TenantId, Key>, std::shared_ptr<Task>> tasks_;  // pending ones
  std::map<Place, RemoteWorker> remote_;                                      // as the last choice was offered them
  std::map<std::string, size_t> given_to_;                                    // segments that a node has been given
  std::map<std::string, std::set<uint64_t>> for_nodes_;                       // local assignments for other nodes
  std::map<storage::TenantId, storage::SessionId> sessions_;
  uint64_t next_plan_ = 1, next_attempt_ = 1;
  bool retrying_ = false, stopped_ = false;
  RouterFigures figures_;  // but for what is counted when it is asked for
};

}  // namespace ashlar::daemon
