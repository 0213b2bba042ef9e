// SPDX-License-Identifier: Apache-2.0
// EventLoop: a bounded queue of closures that run one at a time, tenants in turn, and a thread that runs them. The
// metadata thread is such a loop: closures on it own the cache and all of its state. Another loop makes and unmaps
// large memory.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <variant>

#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/slice.h"
#include "storage/turns.h"

namespace ashlar::daemon {

// CLOCK_MONOTONIC of this process's time namespace. Clients learn what it shows from every SessionReply.
class MonotonicClock final : public storage::Clock {
 public:
  storage::Nanos Now() const override;
};

// One tenant's closures run one after another in the order in which they were posted, whichever call posted them.
// Tenants are served in turn by the time that their closures take (storage/turns.h), so that none waits for what
// another one asks for. Closures of storage::kNoTenant are the daemon's own, and take turns like a tenant's. All
// methods are thread-safe.
class EventLoop {
 public:
  // A tenant that has nothing queued waits, when it comes, for about so long and one closure of each other one.
  static constexpr storage::Nanos kQuantum = 200'000;

  using Closure = std::function<void()>;
  // Work that may take long returns false soon after its slice (a quantum) is over, and true when it is done. It is
  // called again in its tenant's next turn, before all else of that tenant; closures of others run in between.
  using Cut = std::function<bool(storage::Slice&)>;
  using Work = std::variant<Closure, Cut>;
  // Calls `work` as the loop does. False: there is more to do.
  static bool Call(const Work& work, storage::Slice& slice);

  // kAnyThread: where nothing runs and nothing waits, the calling thread is the loop's for this one closure, or its
  // first slice, which has run when the call returns. To wake a thread takes longer than most closures. For callers
  // that hold no locks.
  enum class On { kThread, kAnyThread };

  // At most `queue_depth` posted requests of all `tenants` wait. Half of the room is shared out among them, the other
  // half is for whoever comes first; the daemon's own requests have as much beside it. `clock` must outlive the loop.
  EventLoop(size_t queue_depth, const storage::Clock& clock, size_t tenants = 1);
  ~EventLoop();  // Stop
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // New work. False, at once, when the tenant finds no room or the loop has stopped; the work is then gone.
  bool Post(storage::TenantId tenant, Work work, On on = On::kThread);
  // Work that gives something back. It has twice the room, so that a queue full of requests does not keep it out.
  bool PostRelease(storage::TenantId tenant, Work work, On on = On::kThread);
  // Posts work that follows from work admitted before: it is never refused, because the earlier work bounds it. After
  // Stop nothing can follow any more, and the work is dropped.
  void PostCompletion(storage::TenantId tenant, Work work, On on = On::kThread);

  // Runs `work` on the loop about every `period`, as the daemon's own; not before it has ended the last time.
  void Every(storage::Nanos period, Work work);

  void Start(const char* thread_name = "metadata");  // at most 15 characters
  // For an owner that runs the loop itself, in place of Start: runs one closure, or one slice. False: none waits.
  bool RunNext();
  storage::Nanos due_at() const;  // when the next timer is due; INT64_MAX: there is none
  // Runs what is queued, then ends the thread. Not from a closure.
  void Stop();

  const storage::Clock& clock() const { return clock_; }
  size_t depth() const;                                   // closures that wait
  uint64_t rejected() const { return rejected_.load(); }  // Post and PostRelease that were refused, ever

  // The times of closures and slices, each one turn on the thread.
  struct TurnTimes {
    // Upper bounds of all buckets but the last one, which has none; nanoseconds.
    static constexpr std::array<storage::Nanos, 10> kBounds = {10'000,    50'000,    100'000,   200'000,    500'000,
                                                               1'000'000, 2'000'000, 5'000'000, 10'000'000, 50'000'000};
    std::array<uint64_t, kBounds.size() + 1> turns{};
    storage::Nanos sum = 0, longest = 0;
  };
  TurnTimes TakeTurnTimes();  // since it was called last

 private:
  enum class Class { kRequest, kCompletion };
  struct Item {
    Class kind;
    Work work;
  };
  struct Timer {
    storage::Nanos period;
    storage::Nanos due;
    Work work;
    bool queued = false;
  };

  static constexpr size_t kUnbounded = 0;
  // `times`: how often the tenant's room may be taken.
  bool Take(storage::TenantId tenant, Item item, size_t times, On on);
  // mutex_ is held by all below, but while a closure runs.
  bool HasRoom(storage::TenantId tenant, size_t times) const;
  void Push(storage::TenantId tenant, Item item);
  bool MayRunHere(storage::Nanos now) const;
  void Run(std::unique_lock<std::mutex>& lock, storage::Nanos begin, storage::TenantId tenant, Item item);
  void Measured(storage::Nanos took);
  void QueueDueTimers(storage::Nanos now);
  bool ServeOne(std::unique_lock<std::mutex>& lock);  // false: nothing waits
  void Serve();

  const size_t own_room_, shared_room_;  // requests: of each tenant, and of whoever comes first
  const size_t daemons_room_;
  const storage::Clock& clock_;
  std::atomic<uint64_t> rejected_{0};
  std::thread thread_;  // Start and Stop only

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  storage::TurnQueue<Item> waiting_;              // guarded by mutex_, as all below
  std::map<storage::TenantId, size_t> requests_;  // items of kRequest that wait; of tenants that have some
  std::deque<Timer> timers_;
  storage::Nanos next_due_ = INT64_MAX;  // of timers that are not queued
  TurnTimes times_;
  bool started_ = false;
  bool stopping_ = false;
  bool running_ = false;       // a closure, on whichever thread
  bool thread_waits_ = false;  // for its turn: it has something to do
};

}  // namespace ashlar::daemon
