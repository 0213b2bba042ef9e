// A bounded queue of closures that run one at a time, and a thread that runs them. The metadata thread is one: whoever
// runs on it owns the cache and everything about it. Another makes and unmaps large memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "storage/executor.h"

namespace ashlar::daemon {

// CLOCK_MONOTONIC of this process's time namespace. Clients learn what it shows from every SessionReply.
class MonotonicClock final : public storage::Clock {
 public:
  storage::Nanos Now() const override;
};

// Closures run one after another in the order in which they were posted, whichever call posted them. All methods are
// thread-safe.
class EventLoop {
 public:
  using Closure = std::function<void()>;

  // kAnyThread: where nothing runs and nothing waits, the calling thread is the loop's for this one closure, which has
  // run when the call returns. To wake a thread takes longer than most closures. For callers that hold no locks.
  enum class On { kThread, kAnyThread };

  // At most `queue_depth` posted requests wait; `clock` must outlive the loop.
  EventLoop(size_t queue_depth, const storage::Clock& clock);
  ~EventLoop();  // Stop
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // New work. False, at once, when the queue is full or the loop has stopped; the closure is then gone.
  bool Post(Closure closure, On on = On::kThread);
  // Work that gives something back. It has twice the room, so that a queue full of requests does not keep it out.
  bool PostRelease(Closure closure, On on = On::kThread);
  // What follows from work that was admitted before: never refused, bounded by whatever admitted that work. After Stop
  // nothing can follow any more, and the closure is dropped.
  void PostCompletion(Closure closure, On on = On::kThread);

  // Runs `closure` on the loop about every `period`.
  void Every(storage::Nanos period, Closure closure);

  void Start();
  // Runs what is queued, then ends the thread. Not from a closure.
  void Stop();

  size_t depth() const;                                   // closures that wait
  uint64_t rejected() const { return rejected_.load(); }  // Post and PostRelease that were refused, ever

 private:
  enum class Class { kRequest, kCompletion };
  struct Item {
    Class kind;
    Closure closure;
  };
  struct Timer {
    storage::Nanos period;
    storage::Nanos due;
    Closure closure;
  };

  static constexpr size_t kUnbounded = SIZE_MAX;
  bool Take(Item item, size_t limit, On on);
  void RunHere(std::unique_lock<std::mutex>& lock, Closure closure);  // lock: of mutex_
  void Run();
  std::vector<Closure> TakeDueTimers(storage::Nanos now);  // mutex_ held

  const size_t queue_depth_;
  const storage::Clock& clock_;
  std::atomic<uint64_t> rejected_{0};
  std::thread thread_;  // Start and Stop only

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> queue_;  // guarded by mutex_, as all below
  size_t requests_ = 0;     // items of kRequest in queue_
  std::vector<Timer> timers_;
  bool started_ = false;
  bool stopping_ = false;
  bool running_ = false;       // a closure, on whichever thread
  bool thread_waits_ = false;  // for its turn: it has something to do
};

}  // namespace ashlar::daemon
