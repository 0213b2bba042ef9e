// SPDX-License-Identifier: Apache-2.0
// ThreadPool: the workers that a process creates and lends to kernels, and to other parallel work of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "kernels/device.h"
#include "kernels/mutex.h"

namespace ashlar::kernels {

// Run may be called from several threads at once. Each caller works on its own batch; the pool's threads join any batch
// with remaining work, the oldest first. Indices of a batch are handed out in ascending order. Run allocates nothing.
class ThreadPool final : public Workers {
 public:
  // `threads` counts the calling thread: n creates n − 1 threads, 1 creates none, 0 creates one thread per core. If the
  // process may have no more threads, the pool has fewer.
  explicit ThreadPool(int threads);
  // No Run may be in progress.
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int Size() const override { return static_cast<int>(threads_.size()) + 1; }
  void Run(int64_t count, Body body, void* context) override;

 private:
  struct Batch;  // one call of Run, on its caller's stack

  void Serve();
  Batch* FindWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Append(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remove(Batch* batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Drain(Batch& batch);

  Mutex mutex_;
  CondVar work_;                                    // a batch was appended, or the pool stops
  CondVar finished_;                                // a thread of the pool left a batch
  Batch* first_ ABSL_GUARDED_BY(mutex_) = nullptr;  // batches that may be joined, oldest first
  int sleeping_ ABSL_GUARDED_BY(mutex_) = 0;        // threads that wait for work_
  std::atomic<uint64_t> appended_{0};               // batches so far; changed under mutex_, read by threads that spin
  std::atomic<bool> stop_{false};                   // changed under mutex_
  std::vector<std::thread> threads_;
};

}  // namespace ashlar::kernels
