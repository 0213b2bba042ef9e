// SPDX-License-Identifier: Apache-2.0
// PrefillWorkers: the engines of this node that offer prefill, their assignments, and their measured rates.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/key.h"
#include "proto/object.h"
#include "storage/executor.h"
#include "storage/ids.h"

namespace ashlar::daemon {

// A segment to be computed alone and published under its key.
struct PrefillWork {
  storage::TenantId tenant = 0;
  NamespaceId ns;
  Key key;
  ObjectKind kind = ObjectKind::kSegment;
  uint64_t tokens = 0;
  std::shared_ptr<const std::string> packed;  // tokens packed as in proto/tokens.h
};

// A worker is the opened model of an engine. It asks for work, computes it, and asks again with the result. Between two
// requests it counts as busy. The metadata thread only.
class PrefillWorkers {
 public:
  static constexpr size_t kMostGiven = 64;                 // unfinished assignments per worker
  static constexpr size_t kMostWorkers = 1024;             // workers of this node, shared by its tenants
  static constexpr size_t kLeastWorkers = 16;              // minimum share of a tenant
  static constexpr storage::Nanos kPause = 1'000'000'000;  // longest time between two requests of a live worker
  static constexpr storage::Nanos kDropAfter = 60'000'000'000;

  struct Engine {
    storage::SessionId session = 0;
    uint64_t model = 0;  // its handle in the session
    storage::TenantId tenant = 0;
    NamespaceId ns;
    double tokens_per_second = 0;  // declared rate; 0 if unknown
    bool operator==(const Engine&) const = default;
  };
  struct Result {
    uint64_t assignment = 0;
    bool published = false;
    bool refused = false;  // the engine can never compute it
  };
  // Work for an engine that asked. `assignment` is 0 if there was none in time.
  struct Given {
    uint64_t assignment = 0;
    PrefillWork work;
    storage::Nanos due_in = 0;
  };
  struct Offer {
    uint64_t worker = 0;
    storage::SessionId session = 0;
    double tokens_per_second = 0;  // measured, else declared; 0 if unknown
    uint64_t queued_tokens = 0;    // tokens of its unfinished assignments
    size_t capacity = 0;           // further segments that it can take
  };
  struct Stats {
    uint64_t workers = 0;  // current workers
    uint64_t given = 0;    // unfinished segments
    uint64_t done = 0, failed = 0, overdue = 0;
    uint64_t late = 0;  // results of ended assignments
  };
  using Done = std::function<void(absl::Status)>;
  using Answer = std::function<void(absl::StatusOr<Given>)>;

  explicit PrefillWorkers(const storage::Clock& clock, size_t tenants = 1)
      : clock_(clock), most_of_a_tenant_(std::max(kLeastWorkers, kMostWorkers / std::max<size_t>(1, tenants))) {}

  // Takes an engine's results and answers with work, now or within `wait`. An earlier waiting request of the engine is
  // answered without work. RESOURCE_EXHAUSTED if the tenant has reached its limit of workers and all are busy or
  // waiting; otherwise a new worker replaces the one that has not asked for the longest time.
  void Serve(const Engine& engine, std::span<const Result> results, storage::Nanos wait, Answer answer);

  // Workers that accept work of this namespace.
  std::vector<Offer> Offers(storage::TenantId tenant, const NamespaceId& ns) const;
  // Assigns a segment to a worker, after its earlier ones. `done` is called once, with OK if the worker reports it as
  // published, OUT_OF_RANGE if it can never compute it. Returns the number of the assignment, or 0 if the worker is
  // gone or full; then `done` is not called.
  uint64_t Assign(uint64_t worker, PrefillWork work, storage::Nanos deadline, Done done);
  // Ends an assignment without calling `done`. A later result counts as late.
  void Withdraw(uint64_t assignment);
  // Ends an assignment and calls `done` with `why`.
  void Cancel(uint64_t assignment, const absl::Status& why);

  void ModelClosed(storage::SessionId session, uint64_t model);
  void SessionEnded(storage::SessionId session);
  // Ends what has timed out. Call it many times per second.
  void Tick();
  // Answers all waiting requests. No work is given out afterwards.
  void Stop();
  Stats stats() const;

 private:
  struct Assignment {
    uint64_t number = 0;
    PrefillWork work;
    storage::Nanos deadline = 0;
    Done done;
  };
  struct Worker {
    Engine engine;
    double measured = 0;  // tokens per second; 0 if not measured
    std::deque<Assignment> queue;
    std::optional<Assignment> running;
    storage::Nanos began = 0;  // start of `running`
    Answer waiting;            // null if it is not asking
    storage::Nanos waits_until = 0, asked_at = 0;
    bool stalled = false;  // it has missed a deadline and has not asked since

    bool idle() const { return !waiting && !running.has_value() && queue.empty(); }
    double rate() const { return measured > 0 ? measured : engine.tokens_per_second; }
  };
  using Ended = std::vector<std::pair<Done, absl::Status>>;  // called after all changes here are done

  bool MakeSpace(storage::TenantId tenant);  // reserves space of one more worker; false if there is none
  void Remove(const std::function<bool(const Engine&)>& gone);
  void TakeResults(Worker& worker, std::span<const Result> results, Ended& ended);
  void Give(Worker& worker);
  Done TakeOut(uint64_t assignment);  // null if there is none
  bool Offering(const Worker& worker, storage::Nanos now) const;
  void Fail(Worker& worker, const absl::Status& why, Ended& ended);

  const storage::Clock& clock_;
  const size_t most_of_a_tenant_;
  std::map<uint64_t, Worker> workers_;
  uint64_t next_worker_ = 1, next_assignment_ = 1;
  bool stopped_ = false;
  Stats stats_;
};

}  // namespace ashlar::daemon
