// SPDX-License-Identifier: Apache-2.0
#include "kernels/mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace ashlar {
namespace {

using std::chrono::milliseconds;

struct Counter {
  Mutex mutex;
  CondVar changed;
  int value ABSL_GUARDED_BY(mutex) = 0;
};

TEST(Mutex, TryLockFailsWhileAnotherThreadHoldsIt) {
  Mutex mutex;
  mutex.Lock();
  std::thread([&] { EXPECT_FALSE(mutex.TryLock()); }).join();
  mutex.Unlock();
  const bool taken = mutex.TryLock();
  EXPECT_TRUE(taken);
  if (taken) mutex.Unlock();
}

TEST(MutexLock, UnlockAndLockBeforeTheEndOfTheScope) {
  Counter counter;
  {
    MutexLock lock(counter.mutex);
    lock.Unlock();
    std::thread([&] {
      MutexLock other(counter.mutex);
      ++counter.value;
    }).join();
    lock.Lock();
    EXPECT_EQ(counter.value, 1);
  }
  const bool taken = counter.mutex.TryLock();
  EXPECT_TRUE(taken);
  if (taken) counter.mutex.Unlock();
}

TEST(CondVar, WaitReleasesTheMutexAndReturnsWithIt) {
  Counter counter;
  std::thread other([&] {
    MutexLock lock(counter.mutex);
    while (counter.value == 0) counter.changed.Wait(counter.mutex);
    ++counter.value;
    counter.changed.NotifyAll();
  });
  MutexLock lock(counter.mutex);
  counter.value = 1;
  counter.changed.NotifyOne();
  while (counter.value == 1) counter.changed.Wait(counter.mutex);
  EXPECT_EQ(counter.value, 2);
  lock.Unlock();
  other.join();
}

TEST(CondVar, WaitUntilIsFalseOnceTheDeadlineHasPassed) {
  Counter counter;
  MutexLock lock(counter.mutex);
  const auto deadline = CondVar::Clock::now() + milliseconds(20);
  while (counter.changed.WaitUntil(counter.mutex, deadline)) continue;
  EXPECT_GE(CondVar::Clock::now(), deadline);
  while (counter.changed.WaitFor(counter.mutex, milliseconds(-1))) continue;
  EXPECT_FALSE(counter.changed.WaitFor(counter.mutex, milliseconds(0)));
}

}  // namespace
}  // namespace ashlar
