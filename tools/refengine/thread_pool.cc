#include "tools/refengine/thread_pool.h"

#include <algorithm>

namespace ashlar::refengine {

ThreadPool::ThreadPool(int threads) {
  if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
  for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { Serve(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Run(int64_t count, Body body, void* context) {
  if (threads_.empty() || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = body;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    ++generation_;
  }
  wake_.notify_all();
  Drain();
  // A thread that has not woken yet finds no index left: only those inside Drain must be waited for.
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return serving_ == 0; });
  count_ = 0;
}

void ThreadPool::Serve() {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    if (count_ == 0) continue;  // woke after that Run had ended
    ++serving_;
    lock.unlock();
    Drain();
    lock.lock();
    if (--serving_ == 0) idle_.notify_one();
  }
}

void ThreadPool::Drain() {
  for (;;) {
    const int64_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= count_) return;
    body_(context_, index);
  }
}

}  // namespace ashlar::refengine
