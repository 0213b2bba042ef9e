// SPDX-License-Identifier: Apache-2.0
// WorkerPool: threads that move bytes for the cache, away from the metadata thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "daemon/runtime/event_loop.h"
#include "storage/executor.h"
#include "storage/turns.h"

namespace ashlar::daemon {

// Every tenant has a bounded queue of its own. Tenants are served in turn, by the time that their jobs took; a tenant's
// jobs in order. A `done` is posted to the loop when its work has finished. A completion is never lost: the loop takes
// it without a bound of its own, because these queues already bounded the work.
class WorkerPool final : public storage::Executor {
 public:
  // `threads` jobs run at once. While some of them have run for longer than kOverrun, others run beside them on up to
  // `spare_threads` threads more, one job of each tenant that has none running: nobody waits for the end of another
  // tenant's long job. `queue_depth` is of each tenant: of its jobs, those that wait, run, or whose `done` has not
  // begun; so a `done` may ask for one more. `loop` must outlive the pool.
  // `name`: of the threads, at most 15 characters.
  WorkerPool(int threads, size_t queue_depth, EventLoop& loop, int spare_threads = 0, const char* name = "worker");
  ~WorkerPool() override;  // Stop
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Thread-safe, as all that follow. False when the tenant has `queue_depth` jobs already, or after Stop.
  bool Run(storage::TenantId tenant, std::function<void()> work, std::function<void()> done) override;
  void Post(storage::TenantId tenant, std::function<void()> event) override;
  // True once a job of the tenant has run for kTurn.
  bool ShouldYield(storage::TenantId tenant) const override;

  storage::Nanos LongestRun() const override;

  // Finishes what was taken, posts its completions, ends the threads.
  void Stop();
  // Begins no further job, and ends the threads as soon as their jobs have returned. False: some have not within
  // `patience`; their threads go on, so the pool must never be destroyed.
  bool StopWithin(std::chrono::nanoseconds patience);

  size_t depth() const;    // jobs that wait
  size_t running() const;  // jobs that have not returned
  uint64_t rejected() const { return rejected_.load(); }

  // A tenant is served for about this long before the next one is. A few MiB are moved in it.
  static constexpr std::chrono::nanoseconds kTurn = std::chrono::milliseconds(2);
  static constexpr std::chrono::nanoseconds kOverrun = 4 * kTurn;

 private:
  using Time = std::chrono::steady_clock::time_point;
  using Count = std::shared_ptr<std::atomic<size_t>>;
  struct Job {
    std::function<void()> work, done;
    Count jobs;  // of its tenant
  };
  struct Running {
    storage::TenantId tenant;
    Time begun;
    bool returned = false;  // its completion is being posted
  };

  void Work(size_t thread);
  void RunJob(storage::TenantId tenant, size_t thread, std::unique_lock<std::mutex>& lock);
  // Startable, NextOverrun and Runs need mutex_. Startable returns the tenant whose job a free thread begins; none: it
  // waits.
  std::optional<storage::TenantId> Startable();
  // Returns when a job will have run for too long while others wait; none: that changes nothing.
  std::optional<Time> NextOverrun() const;
  bool Runs(storage::TenantId tenant) const;

  const size_t threads_at_once_;
  const size_t queue_depth_;
  EventLoop& loop_;
  std::atomic<uint64_t> rejected_{0};
  std::vector<std::thread> threads_;  // constructor and Stop only

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable ended_;                 // a thread has
  storage::TurnQueue<Job> queue_{kTurn.count()};  // guarded by mutex_, as below
  std::vector<std::optional<Running>> running_;   // by thread
  std::map<storage::TenantId, Count> jobs_;
  size_t busy_ = 0;        // threads that run a job
  bool watching_ = false;  // a thread waits for NextOverrun
  bool stopping_ = false;
  bool abandoned_ = false;  // no further job begins
  size_t living_ = 0;       // threads
};

}  // namespace ashlar::daemon
