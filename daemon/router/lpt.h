// SPDX-License-Identifier: Apache-2.0
// Lpt: shares a prompt's cold segments out over workers (HYPIC §4.4, equation 9).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/executor.h"

namespace ashlar::daemon {

// No time that the router computes is longer: whoever takes that long takes nothing in practice, and sums of such times
// stay far from the end of the numbers.
constexpr storage::Nanos kLongestCompute = 1'000'000'000'000'000;  // eleven days

// How long so many tokens take. A rate is declared by an engine and may be absurd, but is above 0.
storage::Nanos ComputeTime(uint64_t tokens, double tokens_per_second);

// One worker as it is now. The first one of a plan is the engine that asks, whose results need no journey.
struct LptWorker {
  double tokens_per_second = 0;  // 0: it takes nothing
  storage::Nanos ready_in = 0;   // until it has done what it has been given already
  storage::Nanos delay = 0;      // from the end of a segment's computing until the asking node has it
  size_t room = SIZE_MAX;        // segments that may still be given to it
  // Its node's, an index of `rooms`, which all workers of that node share; kNoNode: nothing bounds it but its own room.
  size_t node = kNoNode;
  static constexpr size_t kNoNode = SIZE_MAX;
};

struct LptPlan {
  static constexpr size_t kNobody = SIZE_MAX;
  std::vector<size_t> worker;        // of each segment; kNobody: no worker takes anything
  std::vector<storage::Nanos> ends;  // when each segment is at the asking node, from now
  storage::Nanos ends_at = 0;        // the last of them
};

// Takes the longest segment first, and gives it to the worker that has it done soonest; of equals the first one, and of
// equally long segments the first one. Where the first worker alone would be done as soon, it gets all. `rooms`: the
// segments that may still be given to each node.
//
// On equally fast workers that are free, the plan takes at most 4/3 − 1/(3m) of the shortest possible time (Graham).
LptPlan PlanLpt(std::span<const uint64_t> tokens, std::span<const LptWorker> workers,
                std::span<const size_t> rooms = {});

}  // namespace ashlar::daemon
