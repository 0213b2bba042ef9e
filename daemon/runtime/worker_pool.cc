// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/worker_pool.h"

#include <algorithm>
#include <utility>

#include "daemon/runtime/named_thread.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

using storage::TenantId;

WorkerPool::WorkerPool(int threads, size_t queue_depth, EventLoop& loop, int spare_threads, const char* name)
    : threads_at_once_(static_cast<size_t>(threads)),
      queue_depth_(queue_depth),
      loop_(loop),
      running_(static_cast<size_t>(threads + spare_threads)) {
  living_ = running_.size();
  for (size_t i = 0; i < running_.size(); ++i) {
    threads_.push_back(NamedThread(name, [this, i] { Work(i); }));
  }
}

WorkerPool::~WorkerPool() {
  Stop();
}

bool WorkerPool::Run(TenantId tenant, std::function<void()> work, std::function<void()> done) {
  {
    MutexLock lock(mutex_);
    Count& jobs = jobs_[tenant];
    if (jobs == nullptr) jobs = std::make_shared<std::atomic<size_t>>(0);
    if (stopping_ || *jobs >= queue_depth_) {
      rejected_.fetch_add(1);
      return false;
    }
    ++*jobs;
    queue_.Push(tenant, {std::move(work), std::move(done), jobs});
  }
  wake_.NotifyOne();
  return true;
}

void WorkerPool::Post(TenantId tenant, std::function<void()> event) {
  loop_.PostCompletion(tenant, std::move(event));
}

bool WorkerPool::ShouldYield(TenantId tenant) const {
  MutexLock lock(mutex_);
  if (queue_.size() == queue_.size(tenant)) return false;
  const Time now = std::chrono::steady_clock::now();
  return std::ranges::any_of(running_, [&](const std::optional<Running>& job) {
    return job.has_value() && job->tenant == tenant && now - job->begun >= kTurn;
  });
}

void WorkerPool::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

bool WorkerPool::StopWithin(std::chrono::nanoseconds patience) {
  {
    MutexLock lock(mutex_);
    stopping_ = abandoned_ = true;
    wake_.NotifyAll();
    const auto deadline = CondVar::Clock::now() + patience;
    while (living_ > 0) {
      if (!ended_.WaitUntil(mutex_, deadline) && living_ > 0) return false;
    }
  }
  Stop();
  return true;
}

storage::Nanos WorkerPool::LongestRun() const {
  MutexLock lock(mutex_);
  storage::Nanos longest = 0;
  const Time now = std::chrono::steady_clock::now();
  for (const auto& job : running_) {
    if (job.has_value() && !job->returned) longest = std::max<storage::Nanos>(longest, (now - job->begun).count());
  }
  return longest;
}

size_t WorkerPool::running() const {
  MutexLock lock(mutex_);
  return std::ranges::count_if(running_, [](const auto& job) { return job.has_value() && !job->returned; });
}

size_t WorkerPool::depth() const {
  MutexLock lock(mutex_);
  return queue_.size();
}

bool WorkerPool::Runs(TenantId tenant) const {
  return std::ranges::any_of(running_, [&](const auto& job) { return job.has_value() && job->tenant == tenant; });
}

std::optional<TenantId> WorkerPool::Startable() {
  if (abandoned_) return std::nullopt;
  if (stopping_ || busy_ < threads_at_once_) return queue_.Next();
  const Time now = std::chrono::steady_clock::now();
  const auto in_turn =
      std::ranges::count_if(running_, [&](const auto& job) { return job.has_value() && now - job->begun < kOverrun; });
  if (static_cast<size_t>(in_turn) >= threads_at_once_) return std::nullopt;
  const auto idle = std::ranges::find_if(
      queue_.waiting(), [this](TenantId tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !Runs(tenant); });
  return idle == queue_.waiting().end() ? std::nullopt : std::optional(*idle);
}

std::optional<WorkerPool::Time> WorkerPool::NextOverrun() const {
  std::optional<Time> next;
  if (queue_.empty()) return next;
  const Time now = std::chrono::steady_clock::now();
  for (const auto& job : running_) {
    if (!job.has_value() || now - job->begun >= kOverrun) continue;
    if (const Time end = job->begun + kOverrun; !next.has_value() || end < *next) next = end;
  }
  return next;
}

void WorkerPool::Work(size_t thread) {
  MutexLock lock(mutex_);
  for (;;) {
    if (const std::optional<TenantId> tenant = Startable()) {
      RunJob(*tenant, thread);
    } else if (stopping_) {
      --living_;
      ended_.NotifyAll();
      return;
    } else if (const std::optional<Time> overrun = NextOverrun(); overrun.has_value() && !watching_) {
      watching_ = true;
      wake_.WaitUntil(mutex_, *overrun);
      watching_ = false;
    } else {
      wake_.Wait(mutex_);
    }
  }
}

void WorkerPool::RunJob(TenantId tenant, size_t thread) {
  Job job = queue_.Take(tenant);
  const Time begun = std::chrono::steady_clock::now();
  running_[thread] = {tenant, begun};
  ++busy_;
  const bool more = !queue_.empty();
  mutex_.Unlock();
  if (more) wake_.NotifyOne();  // to run the next one, or to watch the duration of this one
  job.work();
  job.work = nullptr;
  const auto took = std::chrono::steady_clock::now() - begun;
  mutex_.Lock();
  queue_.Charge(tenant, took.count());
  running_[thread]->returned = true;
  mutex_.Unlock();
  auto end = [done = std::move(job.done), jobs = std::move(job.jobs)] {
    --*jobs;
    done();
  };
  loop_.PostCompletion(tenant, std::move(end), EventLoop::On::kAnyThread);
  mutex_.Lock();
  running_[thread].reset();
  --busy_;
}

}  // namespace ashlar::daemon
