// SPDX-License-Identifier: Apache-2.0
// PrefillWorkers: the engines of this node that offer prefill, what each has been given, and how fast each is.
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
  std::shared_ptr<const std::string> packed;  // its tokens, as proto/tokens.h packs them
};

// A worker is an engine's opened model: it asks for work, computes it, and asks again with the result. While it does
// not ask, it is busy with what it has. The metadata thread only.
class PrefillWorkers {
 public:
  static constexpr size_t kMostGiven = 64;                 // to one worker, and not done
  static constexpr size_t kMostWorkers = 1024;             // of this node, shared out among its tenants
  static constexpr size_t kLeastWorkers = 16;              // but so many of each tenant
  static constexpr storage::Nanos kPause = 1'000'000'000;  // between two requests of one that is not gone
  static constexpr storage::Nanos kDropAfter = 60'000'000'000;

  struct Engine {
    storage::SessionId session = 0;
    uint64_t model = 0;  // its handle in the session
    storage::TenantId tenant = 0;
    NamespaceId ns;
    double tokens_per_second = 0;  // as it has declared; 0: it did not say
    bool operator==(const Engine&) const = default;
  };
  struct Result {
    uint64_t assignment = 0;
    bool published = false;
  };
  // Work for an engine that asked; `assignment` 0: there was none in its time.
  struct Given {
    uint64_t assignment = 0;
    PrefillWork work;
    storage::Nanos due_in = 0;
  };
  struct Offer {
    uint64_t worker = 0;
    storage::SessionId session = 0;
    double tokens_per_second = 0;  // measured, else declared; 0: neither
    uint64_t queued_tokens = 0;    // that it has still to compute
    size_t room = 0;               // for so many segments more
  };
  struct Stats {
    uint64_t workers = 0;  // that offer now
    uint64_t given = 0;    // segments that are not done
    uint64_t done = 0, failed = 0, overdue = 0;
    uint64_t late = 0;  // results of assignments that had ended
  };
  using Done = std::function<void(absl::Status)>;
  using Answer = std::function<void(absl::StatusOr<Given>)>;

  explicit PrefillWorkers(const storage::Clock& clock, size_t tenants = 1)
      : clock_(clock), most_of_a_tenant_(std::max(kLeastWorkers, kMostWorkers / std::max<size_t>(1, tenants))) {}

  // Takes an engine's results, and answers with work, now or within `wait`. An earlier request of it that waits still
  // is answered without work. RESOURCE_EXHAUSTED: the tenant has as many workers as it may, and all are busy or wait;
  // otherwise one more takes the place of the one that has not asked for longest.
  void Serve(const Engine& engine, std::span<const Result> results, storage::Nanos wait, Answer answer);

  // Those that would take work of this namespace.
  std::vector<Offer> Offers(storage::TenantId tenant, const NamespaceId& ns) const;
  // Gives a worker a segment, behind what it has. `done` is called once: OK where it says that it has published it.
  // Returns the assignment's number; 0: the worker has gone or has no room, and `done` is not called.
  uint64_t Assign(uint64_t worker, PrefillWork work, storage::Nanos deadline, Done done);
  // Ends an assignment: `done` is not called, and a result that comes yet is late.
  void Withdraw(uint64_t assignment);
  // The same, but `done` is called with `why`.
  void Cancel(uint64_t assignment, const absl::Status& why);

  void ModelClosed(storage::SessionId session, uint64_t model);
  void SessionEnded(storage::SessionId session);
  // Ends what is past its time. Call it many times a second.
  void Tick();
  // Answers all who wait; from then on there is nothing to be had here.
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
    double measured = 0;  // tokens a second; 0: not yet
    std::deque<Assignment> queue;
    std::optional<Assignment> running;
    storage::Nanos began = 0;  // of `running`
    Answer waiting;            // null: it does not ask now
    storage::Nanos waits_until = 0, asked_at = 0;
    bool stalled = false;  // it has let a deadline pass, and has not asked since

    bool idle() const { return !waiting && !running.has_value() && queue.empty(); }
    double rate() const { return measured > 0 ? measured : engine.tokens_per_second; }
  };
  using Ended = std::vector<std::pair<Done, absl::Status>>;  // called when nothing here is being changed

  bool MakeRoom(storage::TenantId tenant);  // for one worker more; false: there is none
  void Remove(const std::function<bool(const Engine&)>& gone);
  void TakeResults(Worker& worker, std::span<const Result> results, Ended& ended);
  void Give(Worker& worker);
  Done TakeOut(uint64_t assignment);  // null: there is none
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
