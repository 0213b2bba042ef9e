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
  uint64_t capture = 1;  // tokens; states are captured at its multiples
};

// Returns the q-quantile of values, of which there is at least one: the value at rank q · (n − 1), rounded down.
double Quantile(std::vector<double> values, double q);

struct Run {
  std::string trace, policy;
  uint64_t capacity_bytes = 0, capture = 1;
  double optimum = 0;  // no policy has a higher token hit rate (optimum.h)
  uint64_t requests = 0, requests_hit = 0;
  uint64_t tokens = 0, tokens_hit = 0;  // prompt tokens
  // Tokens without a hit: those in no earlier request, and those known but without a state to resume from.
  uint64_t tokens_never_seen = 0, tokens_lost = 0;
  double flops_saved = 0, flops_all = 0;
  Policy::Usage usage;
  Policy::Tuning tuning;
  std::vector<double> first_token_ms;  // indexed by request: time of its prompt's computed tokens at the model's speed
  double seconds = 0;                  // duration of the replay

  double token_hit_rate() const { return static_cast<double>(tokens_hit) / static_cast<double>(tokens); }
  double request_hit_rate() const { return static_cast<double>(requests_hit) / static_cast<double>(requests); }
  double Quantile(double q) const { return replay::Quantile(first_token_ms, q); }
};

// Returns how many of each prompt's tokens are a prefix of an earlier request, prompt or decoded: the most that any
// cache can hit.
std::vector<uint64_t> SharedTokens(const Trace& trace);

// Executes all runs, several at a time, in the order of `specs`. `progress` gets the numbers of finished and of all
// requests, on one thread at a time. A policy that exceeds its capacity ends the replay: INTERNAL.
absl::StatusOr<std::vector<Run>> Replay(const Trace& trace, const Model& model, const std::vector<RunSpec>& specs,
                                        int threads, const std::function<void(uint64_t, uint64_t)>& progress);

}  // namespace ashlar::replay
