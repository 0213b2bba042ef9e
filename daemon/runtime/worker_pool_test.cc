// SPDX-License-Identifier: Apache-2.0
// Work of different tenants: no tenant waits for all work of another one.
#include "daemon/runtime/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

namespace ashlar::daemon {
namespace {

using storage::kNoTenant;
using storage::TenantId;

constexpr TenantId kEve = 1, kAnn = 2, kBob = 3;
constexpr std::chrono::milliseconds kMillisecond(1);
constexpr std::chrono::seconds kPatience(60);

class TenantsAtWork : public ::testing::Test {
 protected:
  TenantsAtWork() { loop_.Start(); }
  ~TenantsAtWork() override { loop_.Stop(); }

  // Begins a job that ends with Release.
  void Hold(WorkerPool& pool, TenantId tenant) {
    std::promise<void> begun;
    EXPECT_TRUE(pool.Run(
        tenant,
        [&] {
          begun.set_value();
          released_.wait();
        },
        [] {}));
    ASSERT_EQ(begun.get_future().wait_for(kPatience), std::future_status::ready);
  }
  void Release() { release_.set_value(); }

  // Starts a job that does nothing; the future becomes ready when the job has ended.
  static std::future<void> Ask(WorkerPool& pool, TenantId tenant) {
    auto done = std::make_shared<std::promise<void>>();
    EXPECT_TRUE(pool.Run(
        tenant, [] {}, [done] { done->set_value(); }));
    return done->get_future();
  }
  static bool Ended(const std::future<void>& job, std::chrono::nanoseconds patience = kPatience) {
    return job.wait_for(patience) == std::future_status::ready;
  }

  MonotonicClock clock_;
  EventLoop loop_{16, clock_};

 private:
  std::promise<void> release_;
  std::shared_future<void> released_ = release_.get_future().share();
};

TEST_F(TenantsAtWork, JobDoesNotWaitForThousandJobsOfOtherTenant) {
  WorkerPool pool(1, 2000, loop_);
  Hold(pool, kNoTenant);
  std::atomic<bool> served = false;
  std::atomic<int> before = 0;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(pool.Run(
        kEve,
        [&] {
          if (served) return;
          ++before;
          std::this_thread::sleep_for(kMillisecond);
        },
        [] {}));
  }
  EXPECT_TRUE(pool.Run(
      kAnn, [&] { served = true; }, [] {}));
  Release();
  pool.Stop();
  EXPECT_TRUE(served);
  EXPECT_LE(before, WorkerPool::kTurn / kMillisecond + 1);
}

TEST_F(TenantsAtWork, EachTenantHasItsOwnQueue) {
  WorkerPool pool(1, 5, loop_);
  Hold(pool, kNoTenant);
  for (int i = 0; i < 5; ++i) Ask(pool, kEve);
  EXPECT_FALSE(pool.Run(
      kEve, [] { FAIL(); }, [] { FAIL(); }));
  EXPECT_EQ(pool.rejected(), 1u);
  const std::future<void> job = Ask(pool, kAnn);
  EXPECT_EQ(pool.depth(), 6u);
  Release();
  EXPECT_TRUE(Ended(job));
  pool.Stop();
}

// Work that is cut into jobs queues its next job from `done`, even while the tenant's queue is full.
TEST_F(TenantsAtWork, AJobThatEndsLeavesSpaceForTheNext) {
  WorkerPool pool(1, 2, loop_);
  std::promise<void> ended;
  const auto again = [&] {
    EXPECT_TRUE(pool.Run(
        kEve, [] {}, [&] { ended.set_value(); }));
  };
  Hold(pool, kNoTenant);
  EXPECT_TRUE(pool.Run(
      kEve, [] {}, again));
  const std::future<void> other = Ask(pool, kEve);
  EXPECT_FALSE(pool.Run(
      kEve, [] {}, [] {}));
  Release();
  EXPECT_TRUE(Ended(ended.get_future()));
  EXPECT_TRUE(Ended(other));
  pool.Stop();
}

TEST_F(TenantsAtWork, AStopDoesNotWaitForAHungJob) {
  WorkerPool pool(2, 5, loop_);
  EXPECT_EQ(pool.LongestRun(), 0);
  Hold(pool, kEve);
  Hold(pool, kAnn);
  EXPECT_TRUE(pool.Run(
      kBob, [] { ADD_FAILURE() << "it had not begun"; }, [] {}));
  std::this_thread::sleep_for(kMillisecond);
  EXPECT_GE(pool.LongestRun(), std::chrono::nanoseconds(kMillisecond).count());
  EXPECT_FALSE(pool.StopWithin(10 * kMillisecond));
  EXPECT_EQ(pool.running(), 2u);
  Release();
  EXPECT_TRUE(pool.StopWithin(kPatience));
  EXPECT_EQ(pool.running(), 0u);
  EXPECT_EQ(pool.LongestRun(), 0);
}

TEST_F(TenantsAtWork, EndlessJobsDelayNoOtherTenant) {
  WorkerPool pool(2, 100, loop_, /*spare_threads=*/2);
  Hold(pool, kEve);
  Hold(pool, kEve);
  const std::future<void> next = Ask(pool, kEve);
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(Ended(Ask(pool, kAnn)));
    EXPECT_TRUE(Ended(Ask(pool, kBob)));
  }
  Hold(pool, kAnn);  // another one that does not end
  EXPECT_TRUE(Ended(Ask(pool, kBob)));
  EXPECT_FALSE(Ended(next, 2 * WorkerPool::kOverrun)) << "more threads for one that has some";
  Release();
  EXPECT_TRUE(Ended(next));
  pool.Stop();
}

// While two jobs of one tenant overrun: three other tenants, each with several jobs, and two run at a time.
TEST_F(TenantsAtWork, SpareThreadsServeInTurn) {
  WorkerPool pool(2, 1000, loop_, /*spare_threads=*/3);
  Hold(pool, kEve);
  Hold(pool, kEve);
  const auto ended = std::make_shared<std::atomic<int>>(0);  // the loop may call back after the end of this test
  std::atomic<bool> stop = false;
  for (const TenantId tenant : {TenantId{10}, TenantId{11}, TenantId{12}}) {
    for (int i = 0; i < 1000; ++i) {
      EXPECT_TRUE(pool.Run(
          tenant,
          [&] {
            if (!stop) std::this_thread::sleep_for(kMillisecond);
          },
          [ended] { ++*ended; }));
    }
  }
  EXPECT_TRUE(Ended(Ask(pool, kAnn)));
  EXPECT_LT(*ended, 100);
  stop = true;
  Release();
  pool.Stop();
}

TEST_F(TenantsAtWork, LongWorkYieldsOnceOthersWait) {
  WorkerPool pool(1, 10, loop_);
  std::promise<void> alone;
  std::atomic<bool> yielded = false;
  EXPECT_TRUE(pool.Run(
      kEve,
      [&] {
        std::this_thread::sleep_for(2 * WorkerPool::kTurn);
        EXPECT_FALSE(pool.ShouldYield(kEve)) << "no other tenant waits";
        alone.set_value();
        const auto begun = std::chrono::steady_clock::now();
        while (!pool.ShouldYield(kEve) && std::chrono::steady_clock::now() - begun < kPatience) {
        }
        yielded = true;
      },
      [] {}));
  alone.get_future().wait();
  EXPECT_TRUE(Ask(pool, kEve).valid());
  std::this_thread::sleep_for(kMillisecond);
  EXPECT_FALSE(yielded) << "to its own tenant's";
  EXPECT_TRUE(Ended(Ask(pool, kAnn)));
  EXPECT_TRUE(yielded);
  pool.Stop();
}

}  // namespace
}  // namespace ashlar::daemon
