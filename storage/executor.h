// SPDX-License-Identifier: Apache-2.0
// Clock, Executor: time and concurrency for the cache, both injected, so that a simulator can decide every order.
#pragma once

#include <cstdint>
#include <functional>

#include "storage/ids.h"

namespace ashlar::storage {

// Monotonic nanoseconds. Never wall time.
using Nanos = int64_t;

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Nanos Now() const = 0;
};

// Runs work away from the metadata thread, each tenant's for itself: one that asks for much keeps nobody else waiting.
class Executor {
 public:
  virtual ~Executor() = default;

  // `done` is called on the metadata thread after `work` returned. The queue is bounded: false, and neither is called,
  // when it is full, or the tenant's share of it. kNoTenant: work for all of them.
  virtual bool Run(TenantId tenant, std::function<void()> work, std::function<void()> done) = 0;

  // While some `work` of the tenant runs, on any of its threads: calls `event` on the metadata thread, before that
  // work's `done`. Never refused: whoever posts sees to it that few wait.
  virtual void Post(TenantId tenant, std::function<void()> event) = 0;

  // Returns whether the tenant has had its share of the threads for now, and others wait. Work that can be cut then
  // ends, and asks to be run again.
  virtual bool ShouldYield(TenantId /*tenant*/) const { return false; }

  // Returns for how long the oldest `work` that runs now has been running; 0: none runs.
  virtual Nanos LongestRun() const { return 0; }
};

}  // namespace ashlar::storage
