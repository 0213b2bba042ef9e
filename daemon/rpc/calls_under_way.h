// SPDX-License-Identifier: Apache-2.0
// CallsUnderWay: counts calls in flight, and stops accepting new ones.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "storage/executor.h"

namespace ashlar::daemon {

// Thread-safe.
class CallsUnderWay {
 public:
  // Returns false if no new calls are accepted.
  bool Enter() {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    ++count_;
    return true;
  }
  void Leave() {
    std::lock_guard lock(mutex_);
    if (--count_ == 0) none_.notify_all();
  }
  // Stops accepting calls, and waits for calls in flight for at most `grace`.
  void Close(storage::Nanos grace) {
    std::unique_lock lock(mutex_);
    closed_ = true;
    none_.wait_for(lock, std::chrono::nanoseconds(grace), [this] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable none_;
  bool closed_ = false;  // guarded by mutex_, like the members below
  int64_t count_ = 0;
};

}  // namespace ashlar::daemon
