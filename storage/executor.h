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

// Runs work away from the metadata thread. `done` is called on the metadata thread after `work` returned. The queue is
// bounded: Run returns false, and calls neither, when it is full.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual bool Run(std::function<void()> work, std::function<void()> done) = 0;
};

}  // namespace ashlar::storage
