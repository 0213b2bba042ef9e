// SPDX-License-Identifier: Apache-2.0
// Executors and workers for tests: orders chosen by hand, or real threads.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/device.h"
#include "kernels/mutex.h"
#include "storage/executor.h"

namespace ashlar::storage {

// Keeps its items until the test runs them, in any order.
class ManualExecutor final : public Executor {
 public:
  explicit ManualExecutor(size_t capacity = 1024) : capacity_(capacity) {}

  bool Run(TenantId tenant, std::function<void()> work, std::function<void()> done) override;
  void Post(TenantId tenant, std::function<void()> event) override;

  bool ShouldYield(TenantId) const override { return crowded_; }

  Nanos LongestRun() const override { return longest_run_; }

  void set_capacity(size_t capacity) { capacity_ = capacity; }
  void set_longest_run(Nanos longest_run) { longest_run_ = longest_run; }  // run time of work that hangs
  void set_crowded(bool crowded) { crowded_ = crowded; }                   // emulates waiting work of another tenant
  size_t pending() const { return items_.size(); }
  TenantId tenant(size_t item) const { return items_.at(item).tenant; }
  void Work(size_t item);          // runs the item's work; its posted events and its `done` still wait
  void Complete(size_t item);      // runs work (unless it has run), posted events, then done, and removes the item
  void Kill() { items_.clear(); }  // as if the process was killed
  void CompleteAll();              // completes in order of submission, including items that completions submit

 private:
  struct Item {
    TenantId tenant;
    std::function<void()> work;
    std::function<void()> done;
    bool worked = false;
    std::vector<std::function<void()>> events;
  };
  size_t capacity_;
  bool crowded_ = false;
  Nanos longest_run_ = 0;
  std::deque<Item> items_;
  Item* working_ = nullptr;
};

// Runs work on separate threads. `done` waits for the test's thread, which is the metadata thread, to call Poll.
class ThreadedExecutor final : public Executor {
 public:
  explicit ThreadedExecutor(int threads);
  ~ThreadedExecutor() override;

  bool Run(TenantId tenant, std::function<void()> work, std::function<void()> done) override;
  void Post(TenantId tenant, std::function<void()> event) override;
  // Runs completions until `finished` holds.
  void PollUntil(const std::function<bool()>& finished);

 private:
  struct Item {
    std::function<void()> work;
    std::function<void()> done;
  };
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::function<void()>> completions_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// Only the calling thread; `before_task` may observe or cancel between tasks.
class InlineWorkers final : public kernels::Workers {
 public:
  int Size() const override { return 1; }
  void Run(int64_t count, Body body, void* context) override;

  std::function<void(int64_t index)> before_task;
};

}  // namespace ashlar::storage
