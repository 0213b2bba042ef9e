// SPDX-License-Identifier: Apache-2.0
// Finds out why an engine does not use the cache, from its metrics.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/ashlarctl/engine_metrics.h"
#include "tools/ashlarctl/host.h"

namespace ashlar::ctl {

// A reason of vllm:ashlar_state, as the connector names it (client/python/ashlar/vllm/state.py).
struct EngineReason {
  const char* reason;
  const char* state;
  const char* remedy;  // empty: the cache is used
};
const std::vector<EngineReason>& EngineReasons();

// An outcome of vllm:ashlar_stores_total for a text that was not stored: an outcome of the commit (proto/outcome.h), or
// one of the connector.
struct StoreOutcome {
  const char* outcome;
  const char* remedy;
};
const std::vector<StoreOutcome>& StoreOutcomes();

// Bad: the engine does not use the cache.
std::vector<Finding> JudgeEngine(const EngineMetrics& metrics);

// Checks the metrics at `url`. The errors begin with "--engine".
absl::StatusOr<std::vector<Finding>> ExamineEngine(const std::string& url);

}  // namespace ashlar::ctl
