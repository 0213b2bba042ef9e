// SPDX-License-Identifier: Apache-2.0
#include "client/engine/background.h"

#include <system_error>
#include <utility>

namespace ashlar::engine {

bool Background::Task::done() const {
  MutexLock lock(mutex_);
  return done_;
}

void Background::Task::Wait() {
  MutexLock lock(mutex_);
  while (!done_) changed_.Wait(mutex_);
}

Background::~Background() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<Background::Task> Background::Start(std::function<void()> work, std::optional<Late> late) {
  auto task = std::make_shared<Task>();
  task->work_ = std::move(work);
  task->late_ = std::move(late);
  MutexLock lock(mutex_);
  // The destructor joins the threads without the lock, so no thread may be added then.
  if (stopping_ || tasks_.size() >= kMostTasks) return nullptr;
  const bool another = idle_ <= tasks_.size() && threads_.size() < kMostThreads;
  if (another && !AddThread() && threads_.empty()) return nullptr;
  tasks_.push_back(task);
  changed_.NotifyOne();
  return task;
}

bool Background::AddThread() {
  try {
    threads_.emplace_back([this] { Serve(); });
    return true;
  } catch (const std::system_error&) {  // the process cannot create another thread
    return false;
  }
}

void Background::Serve() {
  MutexLock lock(mutex_);
  for (;;) {
    ++idle_;
    while (!stopping_ && tasks_.empty()) changed_.Wait(mutex_);
    --idle_;
    if (tasks_.empty()) return;
    const std::shared_ptr<Task> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.Unlock();
    const bool late =
        task->late_.has_value() && std::chrono::steady_clock::now() - task->started_ > task->late_->patience;
    late ? task->late_->otherwise() : task->work_();
    task->work_ = nullptr;
    task->late_.reset();
    {
      MutexLock done(task->mutex_);
      task->done_ = true;
    }
    task->changed_.NotifyAll();
    lock.Lock();
  }
}

}  // namespace ashlar::engine
