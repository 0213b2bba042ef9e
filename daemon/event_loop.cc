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

bool EventLoop::Take(Item item, size_t limit, On on) {
  std::unique_lock lock(mutex_);
  if (item.kind == Class::kRequest && (stopping_ || requests_ >= limit)) {
    rejected_.fetch_add(1);
    return false;
  }
  if (on == On::kAnyThread && started_ && !stopping_ && !running_ && queue_.empty()) {
    RunHere(lock, std::move(item.closure));
    return true;
  }
  if (item.kind == Class::kRequest) ++requests_;
  queue_.push_back(std::move(item));
  const bool seen = running_;  // by whoever runs: he looks when he is done
  lock.unlock();
  if (!seen) wake_.notify_one();
  return true;
}

void EventLoop::RunHere(std::unique_lock<std::mutex>& lock, Closure closure) {
  running_ = true;
  lock.unlock();
  closure();
  closure = nullptr;  // what it captured goes while nothing else runs
  lock.lock();
  running_ = false;
  const bool more = !queue_.empty() || stopping_ || thread_waits_;
  lock.unlock();
  if (more) wake_.notify_one();
}

bool EventLoop::Post(Closure closure, On on) {
  return Take({Class::kRequest, std::move(closure)}, queue_depth_, on);
}

bool EventLoop::PostRelease(Closure closure, On on) {
  return Take({Class::kRequest, std::move(closure)}, 2 * queue_depth_, on);
}

void EventLoop::PostCompletion(Closure closure, On on) {
  Take({Class::kCompletion, std::move(closure)}, kUnbounded, on);
}

void EventLoop::Every(storage::Nanos period, Closure closure) {
  {
    std::lock_guard lock(mutex_);
    timers_.push_back({period, clock_.Now() + period, std::move(closure)});
  }
  wake_.notify_one();
}

void EventLoop::Start() {
  {
    std::lock_guard lock(mutex_);
    started_ = true;
  }
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
    if (running_) {
      thread_waits_ = true;
      wake_.wait(lock, [this] { return !running_; });
      thread_waits_ = false;
    }
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
    running_ = true;
    lock.unlock();
    for (const Closure& timer : due) timer();
    if (closure) closure();
    closure = nullptr;  // what it captured goes before the lock is taken again
    lock.lock();
    running_ = false;
  }
}

}  // namespace ashlar::daemon
