// SPDX-License-Identifier: Apache-2.0
// WorkerPool: threads that move bytes for the cache, outside the metadata thread.
#pragma once

#include <atomic>
#include <chrono>
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
#include "kernels/mutex.h"
#include "storage/executor.h"
#include "storage/turns.h"

namespace ashlar::daemon {

// Every tenant has its own bounded queue. Tenants take turns by the time that their jobs took; a tenant's jobs run in
// order. `done` is posted to the loop when its work has finished. Completions are never lost: the loop accepts them
// without a limit, because these queues bound the work.
class WorkerPool final : public storage::Executor {
 public:
  // `threads` jobs run at once. While some of them exceed kOverrun, up to `spare_threads` more run jobs of tenants
  // without a running job, so that no tenant waits for another tenant's long job. `queue_depth` limits each tenant's
  // jobs that are queued, running, or whose `done` has not started; so a `done` may add one more. `loop` must outlive
  // the pool. `name` of the threads has at most 15 characters.
  WorkerPool(int threads, size_t queue_depth, EventLoop& loop, int spare_threads = 0, const char* name = "worker");
  ~WorkerPool() override;  // calls Stop
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Thread-safe, like the methods below. Returns false if the tenant has `queue_depth` jobs, or after Stop.
  bool Run(storage::TenantId tenant, std::function<void()> work, std::function<void()> done) override;
  void Post(storage::TenantId tenant, std::function<void()> event) override;
  // Returns whether a job of the tenant has run for kTurn.
  bool ShouldYield(storage::TenantId tenant) const override;

  storage::Nanos LongestRun() const override;

  // Finishes the accepted jobs, posts their completions, and ends the threads.
  void Stop();
  // Starts no further job, and ends the threads when their jobs return. Returns false if some did not within
  // `patience`; their threads continue, so the pool must never be destroyed.
  bool StopWithin(std::chrono::nanoseconds patience);

  size_t depth() const;    // queued jobs
  size_t running() const;  // jobs in progress
  uint64_t rejected() const { return rejected_.load(); }

  // A tenant is served for about this long before the next one. This moves a few MiB.
  static constexpr std::chrono::nanoseconds kTurn = std::chrono::milliseconds(2);
  static constexpr std::chrono::nanoseconds kOverrun = 4 * kTurn;

 private:
  using Time = std::chrono::steady_clock::time_point;
  using Count = std::shared_ptr<std::atomic<size_t>>;
  struct Job {
    std::function<void()> work, done;
    Count jobs;  // count of its tenant
  };
  struct Running {
    storage::TenantId tenant;
    Time begun;
    bool returned = false;  // its completion is being posted
  };

  void Work(size_t thread);
  // Releases mutex_ while the job runs.
  void RunJob(storage::TenantId tenant, size_t thread) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the tenant whose job a free thread should start; nothing if it must wait.
  std::optional<storage::TenantId> Startable() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns when a running job exceeds its time while others wait; nothing if that has no effect.
  std::optional<Time> NextOverrun() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Runs(storage::TenantId tenant) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t threads_at_once_;
  const size_t queue_depth_;
  EventLoop& loop_;
  std::atomic<uint64_t> rejected_{0};
  std::vector<std::thread> threads_;  // constructor and Stop only

  mutable Mutex mutex_;
  CondVar wake_;
  CondVar ended_;  // a thread has ended
  storage::TurnQueue<Job> queue_ ABSL_GUARDED_BY(mutex_){kTurn.count()};
  std::vector<std::optional<Running>> running_ ABSL_GUARDED_BY(mutex_);  // index: thread
  std::map<storage::TenantId, Count> jobs_ ABSL_GUARDED_BY(mutex_);
  size_t busy_ ABSL_GUARDED_BY(mutex_) = 0;        // threads that run a job
  bool watching_ ABSL_GUARDED_BY(mutex_) = false;  // a thread waits for NextOverrun
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;  // no further job starts
  size_t living_ ABSL_GUARDED_BY(mutex_) = 0;       // live threads
};

}  // namespace ashlar::daemon
