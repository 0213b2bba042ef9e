// SPDX-License-Identifier: Apache-2.0
// Tenants take turns on the event loop, by the time that their closures take.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <functional>
#include <future>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "daemon/runtime/event_loop.h"

namespace ashlar::daemon {
namespace {

// Time that advances by the cost of each closure, on any thread.
class SteppedClock final : public storage::Clock {
 public:
  storage::Nanos Now() const override { return now_; }
  void Advance(storage::Nanos by) { now_ += by; }

 private:
  std::atomic<storage::Nanos> now_ = 1'000'000'000;
};

// A first closure blocks the loop's thread until everything is posted, so that nothing depends on the speed of threads.
class EventLoopTurns : public ::testing::Test {
 protected:
  static constexpr storage::Nanos kCost = EventLoop::kQuantum / 4;
  static constexpr size_t kDepth = 4096;
  static constexpr storage::TenantId kHeavy = 0, kLight = 1;

  EventLoop::Closure Costing(storage::Nanos cost, char name) {
    return [this, cost, name] {
      clock_.Advance(cost);
      served_ += name;
    };
  }
  // Time spent before the first `name` ran.
  storage::Nanos Before(char name, storage::Nanos cost) const {
    return static_cast<storage::Nanos>(served_.find(name)) * cost;
  }
  void Run() {
    loop_.Start();
    loop_.Stop();
  }

  SteppedClock clock_;
  EventLoop loop_{kDepth, clock_, 2};
  std::string served_;
};

TEST_F(EventLoopTurns, AThousandClosuresOfATenantDelayAnotherByOneQuantum) {
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(loop_.Post(kHeavy, Costing(kCost, 'h')));
  ASSERT_TRUE(loop_.Post(kLight, Costing(kCost, 'l')));
  Run();
  EXPECT_EQ(served_.size(), 1001u);
  EXPECT_LE(Before('l', kCost), EventLoop::kQuantum + kCost);
}

// Completions are never refused, and take turns with their tenant's other work.
TEST_F(EventLoopTurns, AFloodOfCompletionsDelaysNoOtherTenant) {
  for (int i = 0; i < 10'000; ++i) loop_.PostCompletion(kHeavy, Costing(kCost, 'h'));
  loop_.PostCompletion(kLight, Costing(kCost, 'l'));
  loop_.PostCompletion(storage::kNoTenant, Costing(kCost, 'd'));
  Run();
  EXPECT_EQ(served_.size(), 10'002u);
  EXPECT_LE(Before('l', kCost), EventLoop::kQuantum + 2 * kCost);
  EXPECT_LE(Before('d', kCost), 2 * EventLoop::kQuantum + 2 * kCost);
}

TEST_F(EventLoopTurns, ClosuresThatTakeNoTimeDelayNoOther) {
  for (int i = 0; i < 2000; ++i) ASSERT_TRUE(loop_.Post(kHeavy, Costing(0, 'h')));
  ASSERT_TRUE(loop_.Post(kLight, Costing(0, 'l')));
  Run();
  EXPECT_LE(served_.find('l'), 500u);
}

TEST_F(EventLoopTurns, TenantClosuresKeepOrder) {
  std::string order;
  const auto add = [&](char name) { return [&order, name] { order += name; }; };
  ASSERT_TRUE(loop_.Post(kHeavy, add('a')));
  loop_.PostCompletion(kHeavy, add('b'));
  ASSERT_TRUE(loop_.PostRelease(kHeavy, add('c')));
  ASSERT_TRUE(loop_.Post(kHeavy, add('d')));
  Run();
  EXPECT_EQ(order, "abcd");
}

TEST_F(EventLoopTurns, SlicedWorkYieldsToOthersAndStaysFirstForItsTenant) {
  int slices = 0;
  ASSERT_TRUE(loop_.Post(kHeavy, [&](storage::Slice&) {
    clock_.Advance(EventLoop::kQuantum);
    served_ += 'c';
    return ++slices == 20;
  }));
  ASSERT_TRUE(loop_.Post(kHeavy, Costing(kCost, 'h')));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(loop_.Post(kLight, Costing(kCost, 'l')));
  Run();
  EXPECT_EQ(served_.size(), 24u);
  EXPECT_EQ(served_.back(), 'h') << "behind all slices: " << served_;
  EXPECT_LT(served_.find_last_of('l'), 8u) << "between them: " << served_;
}

TEST_F(EventLoopTurns, WorkThatWaitsDelaysOnlyItsTenant) {
  std::function<void()> resume;
  ASSERT_TRUE(loop_.Post(kHeavy, [&](storage::Slice& slice) {
    served_ += resume ? 'r' : 'w';
    if (resume) return true;
    resume = slice.resume();
    slice.Wait();
    return false;
  }));
  ASSERT_TRUE(loop_.Post(kHeavy, Costing(kCost, 'h')));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(loop_.Post(kLight, Costing(kCost, 'l')));
  while (loop_.RunNext()) {
  }
  loop_.PostCompletion(kHeavy, Costing(kCost, 'c'));
  EXPECT_FALSE(loop_.RunNext());
  EXPECT_EQ(served_, "wlll");
  resume();
  while (loop_.RunNext()) {
  }
  EXPECT_EQ(served_, "wlllrhc");
}

TEST_F(EventLoopTurns, StopEndsWaits) {
  std::promise<void> waits;
  ASSERT_TRUE(loop_.Post(kHeavy, [&](storage::Slice& slice) {
    if (!slice.resume()) return true;
    slice.Wait();
    waits.set_value();
    return false;
  }));
  ASSERT_TRUE(loop_.Post(kHeavy, Costing(kCost, 'h')));
  loop_.Start();
  waits.get_future().wait();
  loop_.Stop();
  EXPECT_EQ(served_, "h");
}

TEST_F(EventLoopTurns, TheDaemonsOwnWorkCannotWait) {
  bool can_wait = true;
  loop_.PostCompletion(storage::kNoTenant, [&](storage::Slice& slice) {
    can_wait = static_cast<bool>(slice.resume());
    return true;
  });
  Run();
  EXPECT_FALSE(can_wait);
}

TEST_F(EventLoopTurns, WhatATurnLeavesDelaysNoOtherTurn) {
  EventLoop::AfterTurn([&] { served_ += '1'; });
  EXPECT_EQ(served_, "1") << "outside of turns";
  loop_.PostCompletion(kHeavy, [&] {
    EventLoop::AfterTurn([&] {
      served_ += 'a';
      clock_.Advance(kCost);
      EXPECT_TRUE(loop_.RunNext());
    });
    served_ += 'h';
  });
  loop_.PostCompletion(kLight, [&] { served_ += 'l'; });
  EXPECT_TRUE(loop_.RunNext());
  EXPECT_EQ(served_, "1hal");
  EXPECT_EQ(loop_.TakeTurnTimes().elapsed.longest, 0);
}

TEST_F(EventLoopTurns, ASliceEndsWithItsTime) {
  std::vector<int> steps;
  ASSERT_TRUE(loop_.Post(kHeavy, [&](storage::Slice& slice) {
    steps.push_back(0);
    while (slice.Take()) {
      clock_.Advance(EventLoop::kQuantum / 100);
      ++steps.back();
    }
    return steps.size() == 3;
  }));
  Run();
  ASSERT_EQ(steps.size(), 3u);
  for (const int taken : steps) EXPECT_NEAR(taken, 100, 10);
}

// Half of the space is divided among the tenants; the other half is shared, and one tenant may use all of it.
TEST_F(EventLoopTurns, TenantCannotFillSpaceOfOthers) {
  size_t taken = 0;
  while (loop_.Post(kHeavy, [] {})) ++taken;
  EXPECT_EQ(taken, kDepth * 3 / 4);
  size_t left = 0;
  while (loop_.Post(kLight, [] {})) ++left;
  EXPECT_EQ(left, kDepth / 4);
  EXPECT_TRUE(loop_.Post(storage::kNoTenant, [] {})) << "the operator's questions";
  EXPECT_TRUE(loop_.PostRelease(kHeavy, [] {}));
  EXPECT_TRUE(loop_.PostRelease(kLight, [] {}));
  Run();
}

// A sequence of callers that each find the loop idle would keep its sleeping thread from running due timers.
TEST_F(EventLoopTurns, CallersDoNotDelayADueTimer) {
  std::atomic<bool> ticked{false};
  loop_.Every(1'000'000'000, [&] { ticked = true; });
  loop_.Start();
  while (true) {  // until the thread sleeps
    bool here = false;
    std::promise<void> ran;
    ASSERT_TRUE(loop_.Post(
        kHeavy,
        [&, caller = std::this_thread::get_id()] {
          here = std::this_thread::get_id() == caller;
          ran.set_value();
        },
        EventLoop::On::kAnyThread));
    ran.get_future().wait();
    if (here) break;
  }
  clock_.Advance(2'000'000'000);
  int callers = 0;
  while (!ticked) {
    std::promise<void> ran;
    ASSERT_TRUE(loop_.Post(
        kHeavy, [&] { ran.set_value(); }, EventLoop::On::kAnyThread));
    ran.get_future().wait();
    ++callers;
  }
  EXPECT_LE(callers, 3);
  loop_.Stop();
}

TEST_F(EventLoopTurns, ACallerRunsOneSliceTheThreadRunsTheRest) {
  loop_.Start();
  std::vector<std::thread::id> threads;
  while (threads.empty() || threads.front() != std::this_thread::get_id()) {
    threads.clear();
    std::promise<void> done;
    ASSERT_TRUE(loop_.Post(
        kHeavy,
        [&](storage::Slice&) {
          threads.push_back(std::this_thread::get_id());
          if (threads.size() < 3) return false;
          done.set_value();
          return true;
        },
        EventLoop::On::kAnyThread));
    done.get_future().wait();
  }
  loop_.Stop();
  EXPECT_NE(threads[1], std::this_thread::get_id());
  EXPECT_EQ(threads[1], threads[2]);
}

TEST_F(EventLoopTurns, MeasuresItsTurns) {
  ASSERT_TRUE(loop_.Post(kHeavy, Costing(30'000, 'h')));
  ASSERT_TRUE(loop_.Post(kHeavy, Costing(60'000'000, 'h')));
  Run();
  const EventLoop::TurnTimes::Times times = loop_.TakeTurnTimes().elapsed;
  EXPECT_EQ(times.turns[1], 1u);
  EXPECT_EQ(times.turns.back(), 1u);
  EXPECT_EQ(times.sum, 60'030'000);
  EXPECT_EQ(times.longest, 60'000'000);
  EXPECT_EQ(loop_.TakeTurnTimes().elapsed.sum, 0);
}

TEST_F(EventLoopTurns, CpuTimeExcludesWaiting) {
  constexpr storage::Nanos kBusy = 5'000'000, kAsleep = 500'000'000;
  const auto cpu = [] {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return storage::Nanos{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
  };
  ASSERT_TRUE(loop_.Post(kHeavy, [&] {
    for (const storage::Nanos end = cpu() + kBusy; cpu() < end;) continue;
    std::this_thread::sleep_for(std::chrono::nanoseconds(kAsleep));
  }));
  Run();
  const EventLoop::TurnTimes::Times times = loop_.TakeTurnTimes().cpu;
  EXPECT_EQ(std::accumulate(times.turns.begin(), times.turns.end(), uint64_t{0}), 1u);
  EXPECT_EQ(times.sum, times.longest);
  EXPECT_GE(times.longest, kBusy);
  EXPECT_LT(times.longest, kAsleep);
  EXPECT_EQ(loop_.TakeTurnTimes().cpu.sum, 0);
}

}  // namespace
}  // namespace ashlar::daemon
