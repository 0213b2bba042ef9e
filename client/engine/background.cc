// SPDX-License-Identifier: Apache-2.0
#include "client/engine/background.h"

#include <system_error>
#include <utility>

namespace ashlar::engine {

bool Background::Task::done() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Background::Task::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<Background::Task> Background::Start(std::function<void()> work, std::optional<Late> late) {
  auto task = std::make_shared<Task>();
  task->work_ = std::move(work);
  task->late_ = std::move(late);
  const std::lock_guard lock(mutex_);
  // The destructor joins the threads without the lock: none may be added then.
  if (stopping_ || tasks_.size() >= kMostTasks) return nullptr;
  const bool another = idle_ <= tasks_.size() && threads_.size() < kMostThreads;
  if (another && !AddThread() && threads_.empty()) return nullptr;
  tasks_.push_back(task);
  changed_.notify_one();
  return task;
}

bool Background::AddThread() {
  try {
    threads_.emplace_back([this] { Serve(); });
    return true;
  } catch (const std::system_error&) {  // the process has no thread left
    return false;
  }
}

void Background::Serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    --idle_;
    if (tasks_.empty()) return;
    const std::shared_ptr<Task> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    const bool late =
        task->late_.has_value() && std::chrono::steady_clock::now() - task->started_ > task->late_->patience;
    late ? task->late_->otherwise() : task->work_();
    task->work_ = nullptr;
    task->late_.reset();
    {
      const std::lock_guard done(task->mutex_);
      task->done_ = true;
    }
    task->changed_.notify_all();
    lock.lock();
  }
}

}  // namespace ashlar::engine
