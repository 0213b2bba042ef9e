// SPDX-License-Identifier: Apache-2.0
// Clock, Executor: time and concurrency for the cache. Both are injected, so that a simulator can decide every order.
#pragma once

#include <cstdint>
#include <functional>

#include "storage/ids.h"

namespace ashlar::storage {

// Monotonic nanoseconds, never wall time.
using Nanos = int64_t;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Nanos Now() const = 0;
};

// Runs work outside the metadata thread. Each tenant has its own queue, so that one tenant's load does not delay
// others.
class Executor {
 public:
  virtual ~Executor() = default;

  // Calls `done` on the metadata thread after `work` has returned. The queue is bounded: returns false, calling
  // neither, if it or the tenant's share of it is full. kNoTenant: work for all tenants.
  virtual bool Run(TenantId tenant, std::function<void()> work, std::function<void()> done) = 0;

  // Calls `event` on the metadata thread before the `done` of the tenant's running work. Called by that work, on any of
  // its threads. Never refused, so callers must bound the number of queued events.
  virtual void Post(TenantId tenant, std::function<void()> event) = 0;

  // Returns whether the tenant has used its share of the threads while others wait. Divisible work then returns and is
  // queued again.
  virtual bool ShouldYield(TenantId /*tenant*/) const { return false; }

  // Returns how long the oldest running `work` has been running; 0 without any.
  virtual Nanos LongestRun() const { return 0; }
};

}  // namespace ashlar::storage
