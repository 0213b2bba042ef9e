// SPDX-License-Identifier: Apache-2.0
#include "client/engine/background.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace ashlar::engine {
namespace {

// Holds tasks up until it is opened.
class Gate {
 public:
  void Open() { opened_.set_value(); }
  void Pass() { open_.wait(); }

 private:
  std::promise<void> opened_;
  std::shared_future<void> open_ = opened_.get_future().share();
};

// While it lives no thread can be created, because the address space has no space for its stack.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t vast;
    pthread_attr_init(&vast);
    pthread_attr_setstacksize(&vast, size_t{1} << 60);
    EXPECT_EQ(pthread_setattr_default_np(&vast), 0);
    pthread_attr_destroy(&vast);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
};

TEST(Background, RunsStartedWorkBeforeItEnds) {
  std::atomic<int> ran = 0;
  {
    Background background;
    for (int i = 0; i < 100; ++i) ASSERT_NE(background.Start([&] { ++ran; }), nullptr);
  }
  EXPECT_EQ(ran, 100);
}

TEST(Background, RefusesWorkBeyondItsQueue) {
  Gate gate;
  Background background;
  std::vector<std::shared_ptr<Background::Task>> tasks;
  for (size_t i = 0; i < Background::kMostThreads; ++i) {
    std::promise<void> begun;
    tasks.push_back(background.Start([&] {
      begun.set_value();
      gate.Pass();
    }));
    begun.get_future().wait();
  }
  for (size_t i = 0; i < Background::kMostTasks; ++i) ASSERT_NE(background.Start([] {}), nullptr);
  EXPECT_EQ(background.Start([] {}), nullptr);
  EXPECT_FALSE(tasks[0]->done());
  gate.Open();
  tasks[0]->Wait();
  EXPECT_TRUE(tasks[0]->done());
}

TEST(Background, DropsWorkThatHasWaitedTooLong) {
  Gate gate;
  Background background;
  std::vector<std::shared_ptr<Background::Task>> tasks;
  for (size_t i = 0; i < Background::kMostThreads; ++i) tasks.push_back(background.Start([&] { gate.Pass(); }));
  std::atomic<int> done = 0, abandoned = 0;
  const auto start = [&](std::chrono::milliseconds patience) {
    tasks.push_back(background.Start([&] { ++done; }, Background::Late{patience, [&] { ++abandoned; }}));
  };
  for (int i = 0; i < 10; ++i) start(std::chrono::milliseconds(1));
  for (int i = 0; i < 10; ++i) start(std::chrono::hours(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  gate.Open();
  for (const auto& task : tasks) task->Wait();
  EXPECT_EQ(abandoned, 10);
  EXPECT_EQ(done, 10);
}

// A request's last reference may be dropped by the task that began it. The request then abandons its reservations by a
// further task.
TEST(Background, StartsNoWorkWhileItEnds) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> refused = 0;
    std::optional<Background> background(std::in_place);
    struct StartsAtItsEnd {
      ~StartsAtItsEnd() {
        gate->Pass();
        for (size_t i = 0; i < Background::kMostThreads; ++i) *refused += background->Start([] {}) == nullptr;
      }
      Background* background;
      std::atomic<int>* refused;
      Gate* gate;
    };
    Gate gate;
    auto last = std::shared_ptr<StartsAtItsEnd>(new StartsAtItsEnd{&*background, &refused, &gate});
    background->Start([last = std::move(last)] {});
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(200));  // the destructor has most likely begun
      gate.Open();
    });
    background.reset();
    opener.join();
    if (refused == static_cast<int>(Background::kMostThreads)) return;
  }
  FAIL() << "the destructor was never seen";
}

TEST(Background, StartsNoWorkWithoutAThread) {
  bool ran = false;
  Background background;
  {
    const NoThreads none;
    EXPECT_EQ(background.Start([&] { ran = true; }), nullptr);
  }
  EXPECT_FALSE(ran);
  background.Start([&] { ran = true; })->Wait();
  EXPECT_TRUE(ran) << "there is a thread again";
}

TEST(Background, WorksWithFewerThreadsIfMoreCannotStart) {
  Gate gate;
  Background background;
  const auto first = background.Start([&] { gate.Pass(); });
  const NoThreads none;
  const auto second = background.Start([] {});
  ASSERT_NE(second, nullptr);
  gate.Open();
  second->Wait();
  EXPECT_TRUE(first->done());
}

}  // namespace
}  // namespace ashlar::engine
