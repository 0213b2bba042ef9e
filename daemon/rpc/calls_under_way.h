// SPDX-License-Identifier: Apache-2.0
// CallsUnderWay: counts calls in flight, and stops accepting new ones.
#pragma once

#include <chrono>
#include <cstdint>

#include "kernels/mutex.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// Thread-safe.
class CallsUnderWay {
 public:
  // Returns false if no new calls are accepted.
  bool Enter() {
    MutexLock lock(mutex_);
    if (closed_) return false;
    ++count_;
    return true;
  }
  void Leave() {
    MutexLock lock(mutex_);
    if (--count_ == 0) none_.NotifyAll();
  }
  // Stops accepting calls, and waits for calls in flight for at most `grace`.
  void Close(storage::Nanos grace) {
    MutexLock lock(mutex_);
    closed_ = true;
    const auto deadline = CondVar::Clock::now() + std::chrono::nanoseconds(grace);
    while (count_ > 0 && none_.WaitUntil(mutex_, deadline)) continue;
  }

 private:
  Mutex mutex_;
  CondVar none_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ashlar::daemon
