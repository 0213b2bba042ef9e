// SPDX-License-Identifier: Apache-2.0
#include "storage/testing/executors.h"

#include <utility>

namespace ashlar::storage {

bool ManualExecutor::Run(TenantId tenant, std::function<void()> work, std::function<void()> done) {
  if (items_.size() >= capacity_) return false;
  items_.push_back({tenant, std::move(work), std::move(done)});
  return true;
}

void ManualExecutor::Post(TenantId, std::function<void()> event) {
  working_->events.push_back(std::move(event));
}

void ManualExecutor::Work(size_t item) {
  working_ = &items_.at(item);
  working_->work();
  working_->worked = true;
  working_ = nullptr;
}

void ManualExecutor::Complete(size_t item) {
  if (!items_.at(item).worked) Work(item);
  const Item ended = std::move(items_.at(item));
  items_.erase(items_.begin() + static_cast<ptrdiff_t>(item));
  for (const auto& event : ended.events) event();
  ended.done();
}

void ManualExecutor::CompleteAll() {
  while (!items_.empty()) Complete(0);
}

ThreadedExecutor::ThreadedExecutor(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
}

ThreadedExecutor::~ThreadedExecutor() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

bool ThreadedExecutor::Run(TenantId, std::function<void()> work, std::function<void()> done) {
  {
    MutexLock lock(mutex_);
    queue_.push_back({std::move(work), std::move(done)});
  }
  changed_.NotifyAll();
  return true;
}

void ThreadedExecutor::Post(TenantId, std::function<void()> event) {
  MutexLock lock(mutex_);
  completions_.push_back(std::move(event));
  changed_.NotifyAll();
}

void ThreadedExecutor::PollUntil(const std::function<bool()>& finished) {
  while (!finished()) {
    MutexLock lock(mutex_);
    while (completions_.empty()) changed_.Wait(mutex_);
    const auto done = std::move(completions_.front());
    completions_.pop_front();
    lock.Unlock();
    done();
  }
}

void ThreadedExecutor::Loop() {
  MutexLock lock(mutex_);
  while (true) {
    while (!stopping_ && queue_.empty()) changed_.Wait(mutex_);
    if (queue_.empty()) return;
    Item item = std::move(queue_.front());
    queue_.pop_front();
    lock.Unlock();
    item.work();
    item.work = nullptr;
    lock.Lock();
    completions_.push_back(std::move(item.done));
    changed_.NotifyAll();
  }
}

void InlineWorkers::Run(int64_t count, Body body, void* context) {
  for (int64_t i = 0; i < count; ++i) {
    if (before_task) before_task(i);
    body(context, i);
  }
}

}  // namespace ashlar::storage
