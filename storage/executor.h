// Time and concurrency as the cache sees them: both injected, so that a simulator can decide every order.
#pragma once

#include <cstdint>
#include <functional>

namespace ashlar::storage {

// Monotonic nanoseconds. Never wall time.
using Nanos = int64_t;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Nanos Now() const = 0;
};

// Runs work away from the metadata thread.
class Executor {
 public:
  virtual ~Executor() = default;

  // `done` is called on the metadata thread after `work` returned. The queue is bounded: false, and neither is called,
  // when it is full.
  virtual bool Run(std::function<void()> work, std::function<void()> done) = 0;

  // While some `work` runs, on any of its threads: calls `event` on the metadata thread, before that work's `done`.
  // Never refused: whoever posts sees to it that few wait.
  virtual void Post(std::function<void()> event) = 0;
};

}  // namespace ashlar::storage
