// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/event_loop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "daemon/runtime/worker_pool.h"

namespace ashlar::daemon {
namespace {

// Holds the loop's thread until Open is called.
class Gate {
 public:
  void Open() { promise_.set_value(); }
  void Pass() { future_.wait(); }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

class EventLoopTest : public ::testing::Test {
 protected:
  static constexpr size_t kDepth = 4;
  static constexpr storage::TenantId kTenant = 0;
  MonotonicClock clock_;
  EventLoop loop_{kDepth, clock_};
};

TEST_F(EventLoopTest, RunsClosuresInOrderOnOneThread) {
  std::vector<int> order;
  std::set<std::thread::id> threads;
  for (int i = 0; i < static_cast<int>(kDepth); ++i) {
    ASSERT_TRUE(loop_.Post(kTenant, [&, i] {
      order.push_back(i);
      threads.insert(std::this_thread::get_id());
    }));
  }
  loop_.Start();
  loop_.Stop();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(threads.size(), 1u);
  EXPECT_FALSE(threads.contains(std::this_thread::get_id()));
}

TEST_F(EventLoopTest, ThreadHasName) {
  char name[16] = {};
  ASSERT_TRUE(loop_.Post(kTenant, [&] { pthread_getname_np(pthread_self(), name, sizeof name); }));
  loop_.Start("mappings");
  loop_.Stop();
  EXPECT_STREQ(name, "mappings");
}

TEST_F(EventLoopTest, RefusesAtOnceIfFullButAcceptsReleasesAndCompletions) {
  int releases = 0, completions = 0;
  for (size_t i = 0; i < kDepth; ++i) ASSERT_TRUE(loop_.Post(kTenant, [] {}));
  EXPECT_FALSE(loop_.Post(kTenant, [] { FAIL() << "a refused closure ran"; }));
  for (size_t i = 0; i < kDepth; ++i) EXPECT_TRUE(loop_.PostRelease(kTenant, [&] { ++releases; }));
  EXPECT_FALSE(loop_.PostRelease(kTenant, [&] { ++releases; }));
  for (size_t i = 0; i < 10 * kDepth; ++i) loop_.PostCompletion(kTenant, [&] { ++completions; });
  EXPECT_EQ(loop_.rejected(), 2u);
  EXPECT_EQ(loop_.depth(), 12 * kDepth);
  loop_.Start();
  loop_.Stop();
  EXPECT_EQ(releases, static_cast<int>(kDepth));
  EXPECT_EQ(completions, static_cast<int>(10 * kDepth));
  EXPECT_EQ(loop_.depth(), 0u);
}

TEST_F(EventLoopTest, CompletionsHaveTheirOwnSpace) {
  for (size_t i = 0; i < 10 * kDepth; ++i) loop_.PostCompletion(kTenant, [] {});
  EXPECT_TRUE(loop_.Post(kTenant, [] {}));
  loop_.Start();
}

TEST_F(EventLoopTest, RefusesAfterStop) {
  loop_.Start();
  loop_.Stop();
  EXPECT_FALSE(loop_.Post(kTenant, [] {}));
}

TEST_F(EventLoopTest, TimersRepeatEvenUnderLoad) {
  std::atomic<int> ticks{0};
  std::atomic<bool> busy{true};
  loop_.Every(1'000'000, [&] { ++ticks; });
  std::function<void()> again = [&] {
    if (busy) loop_.PostCompletion(kTenant, again);
  };
  loop_.PostCompletion(kTenant, again);
  loop_.Start();
  while (ticks < 3) std::this_thread::yield();
  busy = false;
  const int under_load = ticks;
  while (ticks < under_load + 3) std::this_thread::yield();
  loop_.Stop();
  EXPECT_GE(ticks, 6);
}

TEST_F(EventLoopTest, RunsOnTheCallingThreadIfIdle) {
  const auto where = [&](EventLoop::On on) {
    std::promise<std::thread::id> thread;
    EXPECT_TRUE(loop_.Post(
        kTenant, [&] { thread.set_value(std::this_thread::get_id()); }, on));
    return thread.get_future().get();
  };
  std::atomic<bool> early{false};
  ASSERT_TRUE(loop_.Post(
      kTenant, [&] { early = true; }, EventLoop::On::kAnyThread));
  EXPECT_FALSE(early) << "before Start nothing runs";
  loop_.Start();
  EXPECT_NE(where(EventLoop::On::kThread), std::this_thread::get_id());
  // The thread may still be returning from that closure: then it also takes this one.
  while (where(EventLoop::On::kAnyThread) != std::this_thread::get_id()) {
  }
  EXPECT_NE(where(EventLoop::On::kThread), std::this_thread::get_id());
  EXPECT_TRUE(early);
  loop_.Stop();
  EXPECT_FALSE(loop_.Post(
      kTenant, [] {}, EventLoop::On::kAnyThread));
}

TEST_F(EventLoopTest, WaitsItsTurnOnAnyThread) {
  loop_.Start();
  std::vector<int> order;
  Gate gate;
  std::promise<void> started;
  ASSERT_TRUE(loop_.Post(kTenant, [&] {
    started.set_value();
    gate.Pass();
    // Closures posted from inside a closure also run later.
    loop_.PostCompletion(
        kTenant, [&] { order.push_back(3); }, EventLoop::On::kAnyThread);
    order.push_back(1);
  }));
  started.get_future().wait();
  ASSERT_TRUE(loop_.PostRelease(
      kTenant, [&] { order.push_back(2); }, EventLoop::On::kAnyThread));
  EXPECT_EQ(loop_.depth(), 1u);
  gate.Open();
  loop_.Stop();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST_F(EventLoopTest, KeepsClosuresPostedDuringCallerRun) {
  std::atomic<int> ticks{0};
  loop_.Every(1'000'000, [&] { ++ticks; });
  loop_.Start();
  int completions = 0;
  bool ran_here = false;
  while (!ran_here) {
    ASSERT_TRUE(loop_.Post(
        kTenant,
        [&, caller = std::this_thread::get_id()] {
          ran_here = std::this_thread::get_id() == caller;
          if (!ran_here) return;
          loop_.PostCompletion(kTenant, [&] { ++completions; });
          // Long enough for the timer to become due, and for its thread to find that it is not its turn.
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        },
        EventLoop::On::kAnyThread));
    while (loop_.depth() != 0) std::this_thread::yield();
  }
  const int before = ticks;
  while (ticks < before + 2) std::this_thread::yield();
  loop_.Stop();
  EXPECT_EQ(completions, 1);
}

TEST_F(EventLoopTest, RunsOneClosureAtATime) {
  loop_.Start();
  std::atomic<int> inside{0};
  int ran = 0;
  std::atomic<int> taken{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, on = t % 2 == 0 ? EventLoop::On::kAnyThread : EventLoop::On::kThread] {
      for (int i = 0; i < 1000; ++i) {
        taken += loop_.Post(
            kTenant,
            [&] {
              EXPECT_EQ(++inside, 1);
              ++ran;
              --inside;
            },
            on);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  loop_.Stop();
  EXPECT_EQ(ran, taken);
  EXPECT_EQ(taken + static_cast<int>(loop_.rejected()), 4000);
}

TEST_F(EventLoopTest, ManyThreadsPost) {
  loop_.Start();
  int ran = 0;  // the loop's thread only
  std::atomic<int> taken{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) taken += loop_.Post(kTenant, [&] { ++ran; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  loop_.Stop();
  EXPECT_EQ(ran, taken);
  EXPECT_EQ(taken + static_cast<int>(loop_.rejected()), 4000);
}

class WorkerPoolTest : public EventLoopTest {
 protected:
  void SetUp() override { loop_.Start(); }
};

TEST_F(WorkerPoolTest, DoneRunsOnTheLoopAfterTheWork) {
  WorkerPool pool(2, 100, loop_);
  std::vector<int> sums(50, 0);
  std::vector<int> done;  // the loop's thread only
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(pool.Run(
        storage::kNoTenant, [&, i] { sums[i] = i + 1; },
        [&, i] {
          EXPECT_EQ(sums[i], i + 1);
          done.push_back(i);
        }));
  }
  pool.Stop();
  loop_.Stop();
  EXPECT_EQ(done.size(), 50u);
  EXPECT_EQ(std::accumulate(done.begin(), done.end(), 0), 49 * 50 / 2);
}

TEST_F(WorkerPoolTest, SingleWorkerCompletesInOrder) {
  WorkerPool pool(1, 100, loop_);
  std::vector<int> done;
  for (int i = 0; i < 20; ++i)
    ASSERT_TRUE(pool.Run(
        storage::kNoTenant, [] {}, [&, i] { done.push_back(i); }));
  pool.Stop();
  loop_.Stop();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(done[i], i);
}

TEST_F(WorkerPoolTest, FullQueueRefusesAndCallsNeither) {
  WorkerPool pool(1, 3, loop_);
  Gate gate;
  std::promise<void> started;
  int done = 0;
  ASSERT_TRUE(pool.Run(
      storage::kNoTenant,
      [&] {
        started.set_value();
        gate.Pass();
      },
      [&] { ++done; }));
  started.get_future().wait();
  ASSERT_TRUE(pool.Run(
      storage::kNoTenant, [] {}, [&] { ++done; }));
  ASSERT_TRUE(pool.Run(
      storage::kNoTenant, [] {}, [&] { ++done; }));
  EXPECT_EQ(pool.depth(), 2u);
  EXPECT_FALSE(pool.Run(
      storage::kNoTenant, [] { FAIL(); }, [] { FAIL(); }));
  EXPECT_EQ(pool.rejected(), 1u);
  gate.Open();
  pool.Stop();
  loop_.Stop();
  EXPECT_EQ(done, 3);
}

TEST_F(WorkerPoolTest, CompletionsAreNotLostWhenTheLoopIsFull) {
  Gate gate;
  ASSERT_TRUE(loop_.Post(kTenant, [&] { gate.Pass(); }));
  while (loop_.depth() != 0) std::this_thread::yield();
  for (size_t i = 0; i < kDepth; ++i) ASSERT_TRUE(loop_.Post(kTenant, [] {}));
  ASSERT_FALSE(loop_.Post(kTenant, [] {}));
  WorkerPool pool(2, 100, loop_);
  int done = 0;
  for (int i = 0; i < 100; ++i) {
    while (!pool.Run(
        storage::kNoTenant, [] {}, [&] { ++done; }))
      std::this_thread::yield();
  }
  pool.Stop();
  gate.Open();
  loop_.Stop();
  EXPECT_EQ(done, 100);
}

}  // namespace
}  // namespace ashlar::daemon
