// Threads that move bytes for the cache, away from the metadata thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "daemon/event_loop.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// Work waits in a bounded queue; its `done` is posted to the loop in the order in which work finished. A completion is
// never lost: the loop takes it without a bound of its own, because this queue already bounded the work.
class WorkerPool final : public storage::Executor {
 public:
  // `loop` must outlive the pool.
  WorkerPool(int threads, size_t queue_depth, EventLoop& loop);
  ~WorkerPool() override;  // Stop
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Thread-safe. False when `queue_depth` jobs wait already, or after Stop.
  bool Run(storage::TenantId tenant, std::function<void()> work, std::function<void()> done) override;
  void Post(storage::TenantId tenant, std::function<void()> event) override;

  // Finishes what was taken, posts its completions, ends the threads.
  void Stop();

  size_t depth() const;  // jobs that wait
  uint64_t rejected() const { return rejected_.load(); }

 private:
  struct Job {
    std::function<void()> work, done;
  };
  void Work();

  const size_t queue_depth_;
  EventLoop& loop_;
  std::atomic<uint64_t> rejected_{0};
  std::vector<std::thread> threads_;  // constructor and Stop only

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;  // guarded by mutex_, as below
  bool stopping_ = false;
};

}  // namespace ashlar::daemon
