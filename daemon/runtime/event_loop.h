// SPDX-License-Identifier: Apache-2.0
// EventLoop: a bounded queue of closures that run one at a time, tenants in turn, and the thread that runs them. The
// metadata thread is such a loop: its closures own the cache and all of its state. Another loop allocates and unmaps
// large memory.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "kernels/mutex.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/slice.h"
#include "storage/turns.h"

namespace ashlar::daemon {

// CLOCK_MONOTONIC of this process's time namespace. Every SessionReply tells clients its current value.
class MonotonicClock final : public storage::Clock {
 public:
  storage::Nanos Now() const override;
};

// The closures of one tenant run in the order in which they were posted. Tenants take turns by the time that their
// closures take (storage/turns.h), so that no tenant waits for another one's load. Closures of storage::kNoTenant
// belong to the daemon, and take turns like those of a tenant. All methods are thread-safe.
class EventLoop {
 public:
  // A tenant without queued closures waits at most about this long plus one closure of each other tenant.
  static constexpr storage::Nanos kQuantum = 200'000;

  using Closure = std::function<void()>;
  // Long work returns false soon after its slice (a quantum) has passed, and true when it is done. It is called again
  // in its tenant's next turn, before the tenant's other closures. Closures of other tenants run in between. Work of a
  // tenant that waits (Slice::Wait) delays the tenant's other closures, its completions too, until it is resumed; so
  // whatever resumes it must not be posted for the tenant. After Stop, and as the daemon's own work, it cannot wait.
  using Cut = std::function<bool(storage::Slice&)>;
  using Work = std::variant<Closure, Cut>;
  // Calls `work` as the loop does. Returns false if more is left.
  static bool Call(const Work& work, storage::Slice& slice);

  // kAnyThread: if the loop is idle, the calling thread runs this closure, or its first slice, before the call returns,
  // because waking a thread takes longer than most closures. The caller must not hold locks.
  enum class On { kThread, kAnyThread };

  // At most `queue_depth` requests of all `tenants` are queued. Half of the space is divided among the tenants, the
  // other half is shared. The daemon's own requests have additional space of the same size. `clock` must outlive the
  // loop.
  EventLoop(size_t queue_depth, const storage::Clock& clock, size_t tenants = 1);
  ~EventLoop();  // calls Stop
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Queues new work. Returns false immediately, dropping the work, if the tenant's queue is full or the loop has
  // stopped.
  bool Post(storage::TenantId tenant, Work work, On on = On::kThread);
  // Queues work that releases something. It has twice the space, so that a queue full of requests does not block it.
  bool PostRelease(storage::TenantId tenant, Work work, On on = On::kThread);
  // Queues work that follows from admitted work. It is never refused, because the earlier work bounds it. After Stop
  // the work is dropped.
  void PostCompletion(storage::TenantId tenant, Work work, On on = On::kThread);

  // Runs `work` on the calling thread after the turn that it runs, or at once if it runs none. Other threads' turns do
  // not wait for it. For replies: sending one can take milliseconds.
  static void AfterTurn(Closure work);

  // Runs `work` on the loop about once per `period`, as the daemon's own work. Runs do not overlap.
  void Every(storage::Nanos period, Work work);

  void Start(const char* thread_name = "metadata");  // at most 15 characters
  // For an owner that runs the loop itself instead of Start: runs one closure or one slice. Returns false if none is
  // queued.
  bool RunNext();
  storage::Nanos due_at() const;  // when the next timer is due; INT64_MAX without one
  // Runs everything in the queue, then ends the thread. Must not be called from a closure.
  void Stop();

  const storage::Clock& clock() const { return clock_; }
  size_t depth() const;                                   // queued closures
  uint64_t rejected() const { return rejected_.load(); }  // refused Post and PostRelease calls since the start

  // Times of closures and slices, each one turn of the thread.
  struct TurnTimes {
    // Upper bounds of all buckets except the last, which is unbounded; nanoseconds.
    static constexpr std::array<storage::Nanos, 10> kBounds = {10'000,    50'000,    100'000,   200'000,    500'000,
                                                               1'000'000, 2'000'000, 5'000'000, 10'000'000, 50'000'000};
    struct Times {
      std::array<uint64_t, kBounds.size() + 1> turns{};
      storage::Nanos sum = 0, longest = 0;
      void Add(storage::Nanos time);
    };
    Times elapsed;  // on the clock, including time without a CPU
    Times cpu;      // CPU time of the thread
  };
  TurnTimes TakeTurnTimes();  // since the previous call

 private:
  enum class Class { kRequest, kCompletion };
  struct Item {
    Class kind;
    Work work;
  };
  struct Timer {
    storage::Nanos period;
    storage::Nanos due;
    Work work;
    bool queued = false;
  };

  static constexpr size_t kUnbounded = 0;
  // `times`: how many times the tenant's space may be used.
  bool Take(storage::TenantId tenant, Item item, size_t times, On on);
  bool HasCapacity(storage::TenantId tenant, size_t times) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Push(storage::TenantId tenant, Item item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Resume(storage::TenantId tenant);
  bool MayRunHere(storage::Nanos now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Run and ServeOne release mutex_ while the closure runs. Run returns what it has left for the time after its turn.
  std::vector<Closure> Run(storage::Nanos begin, storage::TenantId tenant, Item item)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void QueueDueTimers(storage::Nanos now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool ServeOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // returns false if nothing is queued
  void Serve();

  const size_t tenant_capacity_, shared_capacity_;  // space for requests: per tenant, and shared
  const size_t daemon_capacity_;
  const storage::Clock& clock_;
  std::atomic<uint64_t> rejected_{0};
  std::thread thread_;  // Start and Stop only

  mutable Mutex mutex_;
  CondVar wake_;
  storage::TurnQueue<Item> waiting_ ABSL_GUARDED_BY(mutex_);
  std::map<storage::TenantId, size_t> requests_
      ABSL_GUARDED_BY(mutex_);  // queued items of kRequest, per tenant with any
  std::deque<Timer> timers_ ABSL_GUARDED_BY(mutex_);
  storage::Nanos next_due_ ABSL_GUARDED_BY(mutex_) = INT64_MAX;  // earliest due time of timers that are not queued
  TurnTimes times_ ABSL_GUARDED_BY(mutex_);
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;       // a closure is running on some thread
  bool thread_waits_ ABSL_GUARDED_BY(mutex_) = false;  // the thread waits for its turn, with work to do
};

}  // namespace ashlar::daemon
