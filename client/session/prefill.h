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

// The state of a segment of a plan.
enum class PrefillState : uint8_t {
  kPending = 1,  // another engine computes it
  kHere = 2,     // a lookup finds it
  kOwn = 3,      // the requesting engine computes it; in a warm-up, no engine does
};

// The missed segments of a prompt that other engines compute. It keeps the computed ones until EndPrefill.
struct PrefillPlan {
  uint64_t id = 0;                       // 0: no plan; this engine computes all segments
  uint64_t generation = 0;               // connection that granted it; a reconnect ends the plan
  std::vector<PrefillState> states;      // one per requested run
  std::vector<size_t> asked;             // indices of the runs that the daemon was asked about
  std::chrono::nanoseconds expected{0};  // planned time until all are published
};

// A segment for this engine to compute by itself and publish. The engine reserves it (Model::Reserve) as if it had
// missed it itself.
struct PrefillWork {
  uint64_t assignment = 0;
  uint64_t generation = 0;
  ObjectKind kind = ObjectKind::kSegment;  // kSegment, or kCheckpoint for a prompt's first segment
  std::vector<int32_t> tokens;
  std::chrono::nanoseconds due_in{0};  // the daemon reassigns the segment after that
};
struct PrefillResult {
  uint64_t assignment = 0;
  uint64_t generation = 0;
  bool published = false;  // published by any engine: the segment is in this node's cache
  bool refused = false;    // this engine can never compute it
};

}  // namespace ashlar
