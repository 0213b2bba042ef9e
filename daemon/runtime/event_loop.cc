// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/event_loop.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/runtime/named_thread.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {
namespace {

using storage::Nanos;
using storage::TenantId;

// Minimum cost of a closure: dequeuing it and waking a thread take time.
constexpr Nanos kLeastCost = 1'000;

// What the thread runs after its turn; null outside of turns. Of nested turns of two loops, after the outer one.
thread_local std::vector<EventLoop::Closure>* after_turn = nullptr;

Nanos Read(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return Nanos{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

Nanos MonotonicClock::Now() const {
  return Read(CLOCK_MONOTONIC);
}

bool EventLoop::Call(const Work& work, storage::Slice& slice) {
  if (const auto* const cut = std::get_if<Cut>(&work)) return (*cut)(slice);
  std::get<Closure>(work)();
  return true;
}

EventLoop::EventLoop(size_t queue_depth, const storage::Clock& clock, size_t tenants)
    : tenant_capacity_(std::max<size_t>(queue_depth / 2 / std::max<size_t>(tenants, 1), 1)),
      shared_capacity_(queue_depth - std::min(queue_depth, tenant_capacity_ * tenants)),
      daemon_capacity_(queue_depth),
      clock_(clock),
      waiting_(kQuantum) {}

EventLoop::~EventLoop() {
  Stop();
}

bool EventLoop::HasCapacity(TenantId tenant, size_t times) const {
  if (times == kUnbounded) return true;
  const auto found = requests_.find(tenant);
  const size_t own = found == requests_.end() ? 0 : found->second;
  if (tenant == storage::kNoTenant) return own < times * daemon_capacity_;
  if (own < times * tenant_capacity_) return true;
  size_t shared = 0;  // time in use
  for (const auto& [other, waiting] : requests_) {
    if (other != storage::kNoTenant) shared += waiting - std::min(waiting, times * tenant_capacity_);
  }
  return shared < times * shared_capacity_;
}

void EventLoop::Push(TenantId tenant, Item item) {
  if (item.kind == Class::kRequest) ++requests_[tenant];
  waiting_.Push(tenant, std::move(item));
}

// False while a timer is due or the thread waits for its turn, so that callers cannot delay them.
bool EventLoop::MayRunHere(Nanos now) const {
  return started_ && !stopping_ && !running_ && !thread_waits_ && waiting_.empty() && now < next_due_;
}

bool EventLoop::Take(TenantId tenant, Item item, size_t times, On on) {
  MutexLock lock(mutex_);
  if (item.kind == Class::kRequest && (stopping_ || !HasCapacity(tenant, times))) {
    rejected_.fetch_add(1);
    return false;
  }
  if (const Nanos now = clock_.Now(); on == On::kAnyThread && MayRunHere(now)) {
    const std::vector<Closure> after = Run(now, tenant, std::move(item));
    const bool more = !waiting_.empty() || stopping_ || thread_waits_;
    lock.Unlock();
    if (more) wake_.NotifyOne();
    for (const Closure& left : after) left();  // the loop may be gone
    return true;
  }
  Push(tenant, std::move(item));
  const bool seen = running_;  // the running thread checks again when it has finished
  lock.Unlock();
  if (!seen) wake_.NotifyOne();
  return true;
}

bool EventLoop::Post(TenantId tenant, Work work, On on) {
  return Take(tenant, {Class::kRequest, std::move(work)}, 1, on);
}

bool EventLoop::PostRelease(TenantId tenant, Work work, On on) {
  return Take(tenant, {Class::kRequest, std::move(work)}, 2, on);
}

void EventLoop::PostCompletion(TenantId tenant, Work work, On on) {
  Take(tenant, {Class::kCompletion, std::move(work)}, kUnbounded, on);
}

void EventLoop::AfterTurn(Closure work) {
  if (after_turn == nullptr) return work();
  after_turn->push_back(std::move(work));
}

void EventLoop::Every(Nanos period, Work work) {
  {
    MutexLock lock(mutex_);
    const Nanos due = clock_.Now() + period;
    timers_.push_back({period, due, std::move(work)});
    next_due_ = std::min(next_due_, due);
  }
  wake_.NotifyOne();
}

void EventLoop::Start(const char* thread_name) {
  {
    MutexLock lock(mutex_);
    started_ = true;
  }
  thread_ = NamedThread(thread_name, [this] { Serve(); });
}

void EventLoop::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    waiting_.ResumeAll();
  }
  wake_.NotifyOne();
  if (thread_.joinable()) thread_.join();
}

void EventLoop::Resume(TenantId tenant) {
  {
    MutexLock lock(mutex_);
    waiting_.Resume(tenant);
  }
  wake_.NotifyOne();
}

size_t EventLoop::depth() const {
  MutexLock lock(mutex_);
  return waiting_.size();
}

EventLoop::TurnTimes EventLoop::TakeTurnTimes() {
  MutexLock lock(mutex_);
  return std::exchange(times_, {});
}

void EventLoop::TurnTimes::Times::Add(Nanos time) {
  const auto bucket = std::ranges::lower_bound(kBounds, time) - kBounds.begin();
  ++turns[static_cast<size_t>(bucket)];
  sum += time;
  longest = std::max(longest, time);
}

// Runs one closure, or one slice of divided work; the rest of divided work precedes all other work of its tenant.
std::vector<EventLoop::Closure> EventLoop::Run(Nanos begin, TenantId tenant, Item item) {
  running_ = true;
  const bool may_wait = tenant != storage::kNoTenant && !stopping_;
  mutex_.Unlock();
  std::vector<Closure> after;
  const bool nested = after_turn != nullptr;
  if (!nested) after_turn = &after;
  const Nanos cpu_begin = Read(CLOCK_THREAD_CPUTIME_ID);
  const auto resume = [this, tenant] { Resume(tenant); };
  storage::Slice slice(clock_, begin + kQuantum, may_wait ? resume : std::function<void()>());
  const bool done = Call(item.work, slice);
  if (done) item.work = Closure();  // destroys its captures while nothing else runs
  const Nanos took = clock_.Now() - begin, cpu = Read(CLOCK_THREAD_CPUTIME_ID) - cpu_begin;
  mutex_.Lock();
  running_ = false;
  // The rest was already admitted and takes no further place.
  if (!done) waiting_.PushFront(tenant, {Class::kCompletion, std::move(item.work)});
  if (!done && slice.waits() && !stopping_) waiting_.Pause(tenant);
  waiting_.Charge(tenant, std::max(took, kLeastCost));
  times_.elapsed.Add(took);
  times_.cpu.Add(cpu);
  if (!nested) after_turn = nullptr;
  return after;
}

void EventLoop::QueueDueTimers(Nanos now) {
  if (now < next_due_) return;
  next_due_ = INT64_MAX;
  for (Timer& timer : timers_) {
    if (!timer.queued && timer.due <= now) {
      timer.queued = true;
      timer.due = now + timer.period;
      Push(storage::kNoTenant, {Class::kCompletion, [this, &timer](storage::Slice& slice) {
                                  if (!Call(timer.work, slice)) return false;
                                  MutexLock lock(mutex_);
                                  timer.queued = false;
                                  next_due_ = std::min(next_due_, timer.due);
                                  return true;
                                }});
    }
    if (!timer.queued) next_due_ = std::min(next_due_, timer.due);
  }
}

// Checks timers between closures, so that a full queue does not delay deadlines.
bool EventLoop::ServeOne() {
  const Nanos now = clock_.Now();
  QueueDueTimers(now);
  std::optional<std::pair<TenantId, Item>> next = waiting_.Take();
  if (!next.has_value()) return false;
  auto& [tenant, item] = *next;
  if (item.kind == Class::kRequest && --requests_.at(tenant) == 0) requests_.erase(tenant);
  std::vector<Closure> after = Run(now, tenant, std::move(item));
  if (after.empty()) return true;
  mutex_.Unlock();
  const Nanos ended = clock_.Now();
  for (const Closure& left : after) left();
  after.clear();
  const Nanos took = clock_.Now() - ended;
  mutex_.Lock();
  waiting_.Charge(tenant, took);  // other tenants have waited for it
  return true;
}

bool EventLoop::RunNext() {
  MutexLock lock(mutex_);
  return ServeOne();
}

Nanos EventLoop::due_at() const {
  MutexLock lock(mutex_);
  return next_due_;
}

void EventLoop::Serve() {
  MutexLock lock(mutex_);
  for (;;) {
    if (running_) {
      thread_waits_ = true;
      while (running_) wake_.Wait(mutex_);
      thread_waits_ = false;
    }
    if (ServeOne()) continue;
    if (stopping_) return;
    const Nanos wait = std::clamp<Nanos>(next_due_ - clock_.Now(), 0, 1'000'000'000);
    wake_.WaitFor(mutex_, std::chrono::nanoseconds(wait));
  }
}

}  // namespace ashlar::daemon
