// SPDX-License-Identifier: Apache-2.0
#include "kernels/host/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <thread>
#include <vector>

#include "kernels/mutex.h"

namespace ashlar::kernels {
namespace {

TEST(ThreadPool, SizeCountsTheCaller) {
  EXPECT_EQ(ThreadPool(1).Size(), 1);
  EXPECT_EQ(ThreadPool(3).Size(), 3);
  EXPECT_EQ(ThreadPool(0).Size(), static_cast<int>(std::thread::hardware_concurrency()));
}

TEST(ThreadPool, RunsEveryIndexOnceAndSeesTheResults) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int64_t count : {0, 1, 2, 3, 100, 10'000}) {
      std::vector<int> calls(static_cast<size_t>(count), 0);  // not atomic: Run orders the writes before its return
      ParallelFor(pool, count, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
      EXPECT_EQ(calls, std::vector<int>(static_cast<size_t>(count), 1)) << threads << " threads, " << count;
    }
  }
}

TEST(ThreadPool, HandsOutIndicesInAscendingOrder) {
  ThreadPool pool(4);
  struct {
    Mutex mutex;
    std::map<std::thread::id, std::vector<int64_t>> by_thread ABSL_GUARDED_BY(mutex);
  } taken;
  ParallelFor(pool, 1'000, [&](int64_t i) {
    MutexLock lock(taken.mutex);
    taken.by_thread[std::this_thread::get_id()].push_back(i);
  });
  MutexLock lock(taken.mutex);
  for (const auto& [thread, indices] : taken.by_thread) EXPECT_TRUE(std::is_sorted(indices.begin(), indices.end()));
}

// Every body waits until all threads are inside one: the test ends only if Run executes them in parallel.
TEST(ThreadPool, UsesAllItsThreadsAfterASleep) {
  constexpr int kThreads = 4;
  ThreadPool pool(kThreads);
  for (int round = 0; round < 3; ++round) {
    std::atomic<int> inside = 0;
    ParallelFor(pool, kThreads, [&](int64_t) {
      ++inside;
      while (inside < kThreads) std::this_thread::yield();
    });
    EXPECT_EQ(inside, kThreads);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST(ThreadPool, SeveralCallersShareTheThreads) {
  ThreadPool pool(3);
  constexpr int kCallers = 4;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        std::vector<int> calls(17, 0);
        ParallelFor(pool, 17, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
        if (calls != std::vector<int>(17, 1)) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// A caller whose work is done returns, even while another caller's batch keeps the pool's threads busy.
TEST(ThreadPool, AShortBatchDoesNotWaitForALongOne) {
  ThreadPool pool(2);
  std::atomic<int> inside = 0;
  std::atomic<bool> release = false;
  std::thread blocked([&] {
    ParallelFor(pool, 2, [&](int64_t) {
      ++inside;
      while (!release) std::this_thread::yield();
    });
  });
  while (inside < 2) std::this_thread::yield();
  int sum = 0;
  ParallelFor(pool, 10, [&](int64_t i) { sum += static_cast<int>(i); });
  EXPECT_EQ(sum, 45);
  release = true;
  blocked.join();
}

}  // namespace
}  // namespace ashlar::kernels
