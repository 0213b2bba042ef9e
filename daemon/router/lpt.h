// SPDX-License-Identifier: Apache-2.0
// Lpt: distributes a prompt's cold segments over workers (HYPIC §4.4, equation 9).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/executor.h"

namespace ashlar::daemon {

// Upper bound of all times that the router computes. A worker that slow takes nothing in practice, and sums of such
// times cannot overflow.
constexpr storage::Nanos kLongestCompute = 1'000'000'000'000'000;  // eleven days

// For engines without any measurement: all are assumed equally fast.
constexpr double kUnknownRate = 1000;  // tokens per second

// Returns the time to compute `tokens`. The rate is declared by an engine, and may be absurd, but is positive.
storage::Nanos ComputeTime(uint64_t tokens, double tokens_per_second);

// The current state of a worker. The first one of a plan is the requesting engine, whose results need no transfer.
struct LptWorker {
  double tokens_per_second = 0;  // 0: it takes nothing
  storage::Nanos ready_in = 0;   // time until it has finished its assignments
  storage::Nanos delay = 0;      // from the end of computing a segment until the requesting node has it
  size_t capacity = SIZE_MAX;    // segments that it can still take
  // Index in `capacities` of its node, which all workers of the node share; kNoNode: limited only by its own capacity.
  size_t node = kNoNode;
  static constexpr size_t kNoNode = SIZE_MAX;
};

struct LptPlan {
  static constexpr size_t kUnassigned = SIZE_MAX;
  std::vector<size_t> worker;        // worker of each segment; kUnassigned if no worker can take it
  std::vector<storage::Nanos> ends;  // when each segment is at the requesting node, from now
  storage::Nanos ends_at = 0;        // the latest of `ends`
};

// Assigns segments in descending length to the worker that finishes first. Ties go to the first worker and the first
// segment. If the first worker alone would finish as early, it gets all. `capacities` is the number of segments that
// each node can still take.
//
// With m idle workers of equal speed, the plan takes at most 4/3 − 1/(3m) of the optimal time (Graham).
LptPlan PlanLpt(std::span<const uint64_t> tokens, std::span<const LptWorker> workers,
                std::span<const size_t> capacities = {});

}  // namespace ashlar::daemon
