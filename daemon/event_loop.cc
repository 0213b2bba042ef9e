#include "daemon/event_loop.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace ashlar::daemon {

storage::Nanos MonotonicClock::Now() const {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return storage::Nanos{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

EventLoop::EventLoop(size_t queue_depth, const storage::Clock& clock) : queue_depth_(queue_depth), clock_(clock) {}

EventLoop::~EventLoop() {
  Stop();
}

bool EventLoop::PostBounded(Closure closure, size_t limit) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_ || requests_ >= limit) {
      rejected_.fetch_add(1);
      return false;
    }
    ++requests_;
    queue_.push_back({Class::kRequest, std::move(closure)});
  }
  wake_.notify_one();
  return true;
}

bool EventLoop::Post(Closure closure) {
  return PostBounded(std::move(closure), queue_depth_);
}

bool EventLoop::PostRelease(Closure closure) {
  return PostBounded(std::move(closure), 2 * queue_depth_);
}

void EventLoop::PostCompletion(Closure closure) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back({Class::kCompletion, std::move(closure)});
  }
  wake_.notify_one();
}

void EventLoop::Every(storage::Nanos period, Closure closure) {
  {
    std::lock_guard lock(mutex_);
    timers_.push_back({period, clock_.Now() + period, std::move(closure)});
  }
  wake_.notify_one();
}

void EventLoop::Start() {
  thread_ = std::thread([this] { Run(); });
}

void EventLoop::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

size_t EventLoop::depth() const {
  std::lock_guard lock(mutex_);
  return queue_.size();
}

std::vector<EventLoop::Closure> EventLoop::TakeDueTimers(storage::Nanos now) {
  std::vector<Closure> due;
  for (Timer& timer : timers_) {
    if (timer.due > now) continue;
    due.push_back(timer.closure);
    timer.due = now + timer.period;
  }
  return due;
}

void EventLoop::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    // Timers are looked at between any two closures, so that a full queue cannot keep deadlines from passing.
    const std::vector<Closure> due = TakeDueTimers(clock_.Now());
    Closure closure;
    if (!queue_.empty()) {
      if (queue_.front().kind == Class::kRequest) --requests_;
      closure = std::move(queue_.front().closure);
      queue_.pop_front();
    } else if (due.empty()) {
      if (stopping_) return;
      storage::Nanos wait = 1'000'000'000;
      for (const Timer& timer : timers_) wait = std::min(wait, timer.due - clock_.Now());
      wake_.wait_for(lock, std::chrono::nanoseconds(std::max<storage::Nanos>(wait, 0)));
      continue;
    }
    lock.unlock();
    for (const Closure& timer : due) timer();
    if (closure) closure();
    closure = nullptr;  // what it captured goes before the lock is taken again
    lock.lock();
  }
}

}  // namespace ashlar::daemon
