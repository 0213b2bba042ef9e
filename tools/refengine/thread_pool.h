// Threads that the engine lends to kernels and to its own matrix products.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/device.h"

namespace ashlar::refengine {

// The calling thread and threads − 1 of its own. One Run at a time; indices are handed out in ascending order.
class ThreadPool final : public kernels::Workers {
 public:
  explicit ThreadPool(int threads);  // 0: the machine's cores
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int Size() const override { return static_cast<int>(threads_.size()) + 1; }
  void Run(int64_t count, Body body, void* context) override;

 private:
  void Serve();
  void Drain();

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  uint64_t generation_ = 0;  // of the current Run; guarded by mutex_
  int serving_ = 0;          // threads inside Drain; guarded by mutex_
  bool stop_ = false;
  Body body_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  std::vector<std::thread> threads_;
};

}  // namespace ashlar::refengine
