// SPDX-License-Identifier: Apache-2.0
#include "kernels/mutex.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <semaphore.h>

#include <chrono>
#include <csignal>
#include <future>
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

sem_t in_handler, leave_handler;

// As if the scheduler gave the thread no CPU.
void Pause(int) {
  sem_post(&in_handler);
  while (sem_wait(&leave_handler) != 0) continue;
}

TEST(CondVar, NotifyDoesNotWaitForAThreadThatWasNotifiedBefore) {
  ASSERT_EQ(sem_init(&in_handler, 0, 0), 0);
  ASSERT_EQ(sem_init(&leave_handler, 0, 0), 0);
  struct sigaction pause {};
  pause.sa_handler = Pause;
  struct sigaction before {};
  ASSERT_EQ(sigaction(SIGUSR1, &pause, &before), 0);
  Counter counter;
  int waiting = 0;  // guarded by counter.mutex
  const auto wait = [&] {
    MutexLock lock(counter.mutex);
    ++waiting;
    while (counter.value == 0) counter.changed.Wait(counter.mutex);
  };
  const auto wait_for = [&](int threads) {
    for (bool all = false; !all;) {
      std::this_thread::yield();
      const MutexLock lock(counter.mutex);
      all = waiting == threads;
    }
  };
  std::thread paused(wait);
  wait_for(1);
  pthread_kill(paused.native_handle(), SIGUSR1);
  while (sem_wait(&in_handler) != 0) continue;
  counter.changed.NotifyOne();
  std::thread other(wait);
  wait_for(2);
  {
    MutexLock lock(counter.mutex);
    counter.value = 1;
  }
  const std::future<void> notified = std::async(std::launch::async, [&] { counter.changed.NotifyOne(); });
  EXPECT_EQ(notified.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  sem_post(&leave_handler);
  paused.join();
  counter.changed.NotifyAll();
  other.join();
  sigaction(SIGUSR1, &before, nullptr);
}

TEST(CondVar, EveryNotificationArrives) {
  constexpr int kTurns = 20'000;
  Counter counter;
  const auto take_turns = [&](int parity) {
    MutexLock lock(counter.mutex);
    while (counter.value < kTurns) {
      if (counter.value % 2 == parity) {
        ++counter.value;
        counter.changed.NotifyOne();
      } else {
        counter.changed.Wait(counter.mutex);
      }
    }
  };
  std::thread even(take_turns, 0), odd(take_turns, 1);
  even.join();
  odd.join();
  const MutexLock lock(counter.mutex);
  EXPECT_GE(counter.value, kTurns);
}

}  // namespace
}  // namespace ashlar
