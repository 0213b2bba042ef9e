// SPDX-License-Identifier: Apache-2.0
#include "kernels/host/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>

namespace ashlar::kernels {
namespace {

// A layer's kernels follow each other within microseconds: a thread that slept between them would cost more than it
// gains. After a longer pause the process has other work, and the core is released.
constexpr std::chrono::microseconds kSpin{30};

// Waits briefly for `ready`. Returns whether it became true.
template <typename Ready>
bool Spin(Ready ready) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    if (ready()) return true;
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < deadline);
  return ready();
}

}  // namespace

struct ThreadPool::Batch {
  const Body body;
  void* const context;
  const int64_t count;
  std::atomic<int64_t> next{0};
  std::atomic<int> joined{0};  // threads of the pool inside; changed under mutex_
  Batch* following = nullptr;  // guarded by the pool's mutex_
};

ThreadPool::ThreadPool(int threads) {
  if (threads == 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  threads_.reserve(static_cast<size_t>(std::max(threads - 1, 0)));
  try {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { Serve(); });
  } catch (const std::system_error&) {
    // The process may have no more threads. The existing ones do the work.
  }
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Run(int64_t count, Body body, void* context) {
  if (count <= 1 || threads_.empty()) {
    for (int64_t i = 0; i < count; ++i) body(context, i);
    return;
  }
  Batch batch{body, context, count};
  int64_t wake;
  {
    MutexLock lock(mutex_);
    Append(&batch);
    wake = std::min<int64_t>(count - 1, sleeping_);
  }
  for (; wake > 0; --wake) work_.NotifyOne();
  Drain(batch);
  {
    MutexLock lock(mutex_);
    Remove(&batch);  // from now on no thread joins
  }
  const auto left = [&batch] { return batch.joined.load(std::memory_order_acquire) == 0; };
  if (Spin(left)) return;
  MutexLock lock(mutex_);
  while (!left()) finished_.Wait(mutex_);
}

void ThreadPool::Drain(Batch& batch) {
  for (int64_t i; (i = batch.next.fetch_add(1, std::memory_order_relaxed)) < batch.count;) {
    batch.body(batch.context, i);
  }
}

void ThreadPool::Serve() {
  MutexLock lock(mutex_);
  while (!stop_) {
    if (Batch* batch = FindWork()) {
      batch->joined.fetch_add(1, std::memory_order_relaxed);
      lock.Unlock();
      Drain(*batch);
      lock.Lock();
      // The last access: once the count is down, the caller may return and the batch is gone.
      if (batch->joined.fetch_sub(1, std::memory_order_release) == 1) finished_.NotifyAll();
      continue;
    }
    const uint64_t seen = appended_;
    lock.Unlock();
    const bool more = Spin([&] { return appended_ != seen || stop_; });
    lock.Lock();
    if (more || stop_ || FindWork() != nullptr) continue;
    ++sleeping_;
    while (!stop_ && FindWork() == nullptr) work_.Wait(mutex_);
    --sleeping_;
  }
}

ThreadPool::Batch* ThreadPool::FindWork() const {
  Batch* batch = first_;
  while (batch != nullptr && batch->next.load(std::memory_order_relaxed) >= batch->count) batch = batch->following;
  return batch;
}

void ThreadPool::Append(Batch* batch) {
  Batch** end = &first_;
  while (*end != nullptr) end = &(*end)->following;
  *end = batch;
  ++appended_;
}

void ThreadPool::Remove(Batch* batch) {
  Batch** link = &first_;
  while (*link != batch) link = &(*link)->following;
  *link = batch->following;
}

}  // namespace ashlar::kernels
