#include "daemon/worker_pool.h"

#include <utility>

namespace ashlar::daemon {

WorkerPool::WorkerPool(int threads, size_t queue_depth, EventLoop& loop) : queue_depth_(queue_depth), loop_(loop) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

WorkerPool::~WorkerPool() {
  Stop();
}

bool WorkerPool::Run(storage::TenantId, std::function<void()> work, std::function<void()> done) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ || queue_.size() >= queue_depth_) {
      rejected_.fetch_add(1);
      return false;
    }
    queue_.push_back({std::move(work), std::move(done)});
  }
  wake_.notify_one();
  return true;
}

void WorkerPool::Post(storage::TenantId, std::function<void()> event) {
  loop_.PostCompletion(std::move(event));
}

void WorkerPool::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

size_t WorkerPool::depth() const {
  std::lock_guard lock(mutex_);
  return queue_.size();
}

void WorkerPool::Work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    job.work();
    job.work = nullptr;
    loop_.PostCompletion(std::move(job.done), EventLoop::On::kAnyThread);
    lock.lock();
  }
}

}  // namespace ashlar::daemon
