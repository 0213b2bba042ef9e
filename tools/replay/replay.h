// SPDX-License-Identifier: Apache-2.0
// Replaying traces: several policies at several capacities.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/replay/models.h"
#include "tools/replay/policy.h"
#include "tools/replay/trace.h"

namespace ashlar::replay {

struct RunSpec {
  std::string policy;
  uint64_t capacity_bytes = 0;
};

struct Run {
  std::string trace, policy;
  uint64_t capacity_bytes = 0;
  uint64_t requests = 0, requests_hit = 0;
  uint64_t tokens = 0, tokens_hit = 0;  // prompt tokens
  // Of the tokens without a hit: those in no earlier request, and those known but not to be resumed from.
  uint64_t tokens_never_seen = 0, tokens_lost = 0;
  double flops_saved = 0, flops_all = 0;
  Policy::Usage usage;
  Policy::Tuning tuning;
  std::vector<double> first_token_ms;  // by request: time of its prompt's computed tokens at the model's speed
  double seconds = 0;                  // duration of the replay

  double token_hit_rate() const { return static_cast<double>(tokens_hit) / static_cast<double>(tokens); }
  double request_hit_rate() const { return static_cast<double>(requests_hit) / static_cast<double>(requests); }
  double Quantile(double q) const;  // quantile of first_token_ms
};

// Returns how many of each prompt's tokens begin some earlier request, prompt or decoded: the most that any cache can
// hit.
std::vector<uint64_t> SharedTokens(const Trace& trace);

// All runs, several at a time, in the order of `specs`. `progress` is told requests done and all of them, from one
// thread at a time. A policy that exceeds its capacity ends it all: INTERNAL.
absl::StatusOr<std::vector<Run>> Replay(const Trace& trace, const Model& model, const std::vector<RunSpec>& specs,
                                        int threads, const std::function<void(uint64_t, uint64_t)>& progress);

}  // namespace ashlar::replay
