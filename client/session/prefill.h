// SPDX-License-Identifier: Apache-2.0
// Cold prompts in parallel: engines that compute segments for one another (docs/router.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "proto/object.h"

namespace ashlar {

// What becomes of a segment of a plan.
enum class PrefillState : uint8_t {
  kPending = 1,  // another engine computes it
  kHere = 2,     // a look-up finds it
  kOwn = 3,      // the engine that asked computes it itself; of a warm-up: nobody does
};

// Which of the segments that a prompt misses others compute. It keeps what has come until EndPrefill.
struct PrefillPlan {
  uint64_t id = 0;                       // 0: there is none, all is this engine's own
  uint64_t generation = 0;               // of the connection that granted it: after a reconnect it has ended
  std::vector<PrefillState> states;      // one a run that was asked for
  std::vector<size_t> asked;             // of these the daemon was asked for, by index
  std::chrono::nanoseconds expected{0};  // until all are there, as planned
};

// A segment that this engine is to compute alone and publish. The engine reserves it (Model::Reserve) as if it had
// missed it itself.
struct PrefillWork {
  uint64_t assignment = 0;
  uint64_t generation = 0;
  ObjectKind kind = ObjectKind::kSegment;  // kSegment, or kCheckpoint for a prompt's first segment
  std::vector<int32_t> tokens;
  std::chrono::nanoseconds due_in{0};  // another engine gets it after that
};
struct PrefillResult {
  uint64_t assignment = 0;
  uint64_t generation = 0;
  bool published = false;  // by this engine or another one: it is in the cache of this node
};

}  // namespace ashlar
