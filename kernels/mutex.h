// SPDX-License-Identifier: Apache-2.0
// Mutex, MutexLock and CondVar: the standard library's, annotated for clang's -Wthread-safety. All locks use these.
//
// Annotate the members that a mutex guards with ABSL_GUARDED_BY, and functions that require it with
// ABSL_EXCLUSIVE_LOCKS_REQUIRED. tests/clang checks the annotations. absl::CondVar is not used, because its timeouts
// follow the system's wall clock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if __has_include(<absl/base/thread_annotations.h>)
#include <absl/base/thread_annotations.h>
#else  // a machine that builds only kernels/
#define ABSL_GUARDED_BY(mutex)
#define ABSL_EXCLUSIVE_LOCKS_REQUIRED(...)
#define ABSL_ACQUIRED_AFTER(...)
#define ABSL_EXCLUSIVE_LOCK_FUNCTION(...)
#define ABSL_EXCLUSIVE_TRYLOCK_FUNCTION(...)
#define ABSL_UNLOCK_FUNCTION(...)
#define ABSL_LOCKABLE
#define ABSL_SCOPED_LOCKABLE
#define ABSL_NO_THREAD_SAFETY_ANALYSIS
#endif

namespace ashlar {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }
  bool TryLock() ABSL_EXCLUSIVE_TRYLOCK_FUNCTION(true) { return mutex_.try_lock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex until it goes out of scope, except between Unlock and Lock.
class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() {
    if (held_) mutex_.Unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() {
    mutex_.Lock();
    held_ = true;
  }
  void Unlock() ABSL_UNLOCK_FUNCTION() {
    held_ = false;
    mutex_.Unlock();
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// Waits may end without a reason: call them in a loop that tests the condition. Timeouts follow the steady clock.
class CondVar {
 public:
  using Clock = std::chrono::steady_clock;

  void Wait(Mutex& mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // False once the deadline has passed.
  bool WaitUntil(Mutex& mutex, Clock::time_point deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool notified = condition_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return notified;
  }
  bool WaitFor(Mutex& mutex, std::chrono::nanoseconds timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return WaitUntil(mutex, Clock::now() + timeout);
  }

  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace ashlar
