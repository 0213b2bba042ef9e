// SPDX-License-Identifier: Apache-2.0
// Policy: a cache of prefixes under some policy, through which a trace is replayed, and its results.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/prefix/prefix_entry.h"

namespace ashlar::replay {

class Policy {
 public:
  virtual ~Policy() = default;

  // Replays one request, from its arrival to its last token: `tokens` begin with the prompt. Returns how many of the
  // prompt's tokens were not computed.
  virtual uint64_t Request(std::span<const int32_t> tokens, uint64_t prompt) = 0;

  struct Usage {
    uint64_t bytes = 0, peak_bytes = 0;
    uint64_t states = 0;     // checkpoints kept
    uint64_t evictions = 0;  // evicted checkpoints
    uint64_t refusals = 0;   // refused offers
  };
  virtual Usage usage() const = 0;

  // The trials of a policy that tunes itself, and its choice.
  struct Tuning {
    double alpha = 0;
    struct Trial {
      double alpha, token_hit_rate, flops_saved;
    };
    std::vector<Trial> grid;
  };
  virtual Tuning tuning() const { return {}; }
};

// none | block:TOKENS | sglang | marconi | marconi:ALPHA | ashlar | ashlar:TOKENS, of an engine that can checkpoint
// inside prompts at multiples of so many tokens only. INVALID_ARGUMENT.
absl::StatusOr<std::unique_ptr<Policy>> MakePolicy(const std::string& name, const storage::PrefixCosts& costs,
                                                   uint64_t capacity_bytes);

}  // namespace ashlar::replay
