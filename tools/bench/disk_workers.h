// SPDX-License-Identifier: Apache-2.0
// Threads that each take the next item of a list until no item is left or one fails, and memory for the data that they
// move.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "kernels/mutex.h"

namespace ashlar::bench {

// Aligned to pages, every byte written.
class PageBuffer {
 public:
  explicit PageBuffer(size_t bytes)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)), &std::free), bytes_(bytes) {
    uint64_t word = 0x9E3779B97F4A7C15;
    for (size_t i = 0; i < bytes; i += sizeof word) {
      word = word * 6364136223846793005 + 1442695040888963407;
      *reinterpret_cast<uint64_t*>(memory_.get() + i) = word;
    }
  }
  std::byte* data() const { return memory_.get(); }
  size_t size() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[], decltype(&std::free)> memory_;
  size_t bytes_;
};

// Calls `item(number, thread)` for every number, on `threads` threads. The first error ends it.
inline absl::Status ForEach(const std::vector<uint32_t>& numbers, int threads,
                            const std::function<absl::Status(uint32_t number, int thread)>& item) {
  std::atomic<size_t> next{0};
  struct {
    Mutex mutex;
    absl::Status status ABSL_GUARDED_BY(mutex);
  } first;
  std::vector<std::thread> pool;
  for (int thread = 0; thread < threads; ++thread) {
    pool.emplace_back([&, thread] {
      for (size_t i = next++; i < numbers.size(); i = next++) {
        const absl::Status moved = item(numbers[i], thread);
        if (moved.ok()) continue;
        next = numbers.size();
        MutexLock lock(first.mutex);
        first.status.Update(moved);
      }
    });
  }
  for (std::thread& thread : pool) thread.join();
  MutexLock lock(first.mutex);
  return first.status;
}

}  // namespace ashlar::bench
