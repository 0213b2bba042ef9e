// SPDX-License-Identifier: Apache-2.0
// Background: runs calls that an engine has started without waiting for them.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "kernels/mutex.h"

namespace ashlar::engine {

// A few threads, created when they are first needed, and a bounded queue. Thread-safe.
class Background {
 public:
  static constexpr size_t kMostThreads = 4;
  static constexpr size_t kMostTasks = 1024;

  // Runs instead of work that has waited for a thread longer than `patience`. Otherwise, if calls hang, work whose
  // callers have stopped waiting would still take its turn.
  struct Late {
    std::chrono::milliseconds patience;
    std::function<void()> otherwise;
  };

  // A started call. Thread-safe.
  class Task {
   public:
    bool done() const;
    void Wait();

   private:
    friend class Background;
    std::function<void()> work_;  // empty once the task is done
    std::optional<Late> late_;    // empty once the task is done
    std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
    mutable Mutex mutex_;
    CondVar changed_;
    bool done_ ABSL_GUARDED_BY(mutex_) = false;
  };

  ~Background();  // runs all started tasks

  // Returns null if too many tasks are waiting, if there is no thread to run the task, or if this object is being
  // destroyed: a task that ends then may start another.
  std::shared_ptr<Task> Start(std::function<void()> work, std::optional<Late> late = std::nullopt);

 private:
  void Serve();
  bool AddThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::shared_ptr<Task>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ashlar::engine
