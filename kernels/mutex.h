// SPDX-License-Identifier: Apache-2.0
// Mutex, MutexLock and CondVar, annotated for clang's -Wthread-safety. All locks use these.
//
// Annotate the members that a mutex guards with ABSL_GUARDED_BY, and functions that require it with
// ABSL_EXCLUSIVE_LOCKS_REQUIRED. tests/clang checks the annotations.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
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
//
// A futex that counts notifications. Two others are not used: notifying a std::condition_variable blocks, with glibc
// before 2.41, until threads that were notified before have run, which takes milliseconds on a busy machine; timeouts
// of an absl::CondVar follow the system's wall clock.
class CondVar {
 public:
  using Clock = std::chrono::steady_clock;

  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void Wait(Mutex& mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { Sleep(mutex, nullptr); }
  // False once the deadline has passed.
  bool WaitUntil(Mutex& mutex, Clock::time_point deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.time_since_epoch()).count();
    const timespec until{.tv_sec = ns < 0 ? 0 : ns / kSecond, .tv_nsec = ns < 0 ? 0 : ns % kSecond};
    return Sleep(mutex, &until);
  }
  bool WaitFor(Mutex& mutex, std::chrono::nanoseconds timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return WaitUntil(mutex, Clock::now() + timeout);
  }

  // Neither blocks. Change the condition under the mutex before the call.
  void NotifyOne() { Wake(1); }
  void NotifyAll() { Wake(INT_MAX); }

 private:
  static constexpr int64_t kSecond = 1'000'000'000;
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

  // A notification after the mutex is released changes the count, and so ends the wait.
  bool Sleep(Mutex& mutex, const timespec* until) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    waiting_.fetch_add(1);
    const uint32_t seen = notified_.load();
    mutex.Unlock();
    // FUTEX_WAIT_BITSET takes an absolute time of the steady clock.
    const long ended = syscall(SYS_futex, &notified_, FUTEX_WAIT_BITSET_PRIVATE, seen, until, nullptr,  // NOLINT
                               FUTEX_BITSET_MATCH_ANY);
    const bool late = ended != 0 && errno == ETIMEDOUT;
    waiting_.fetch_sub(1);
    mutex.Lock();
    return !late;
  }
  void Wake(int most) {
    if (waiting_.load() == 0) return;
    notified_.fetch_add(1);
    syscall(SYS_futex, &notified_, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
  }

  std::atomic<uint32_t> notified_{0};
  std::atomic<uint32_t> waiting_{0};  // threads in Sleep, incremented under the mutex
};

}  // namespace ashlar
