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

// Makes the policy of an engine that captures states at multiples of `capture` tokens only, so that a prompt resumes
// only there. The names are in ashlar-replay's help; `ashlar:N` checkpoints inside prompts at multiples of N. Pages of
// the published policies take no more bytes than their tokens. INVALID_ARGUMENT.
absl::StatusOr<std::unique_ptr<Policy>> MakePolicy(const std::string& name, const storage::PrefixCosts& costs,
                                                   uint64_t capacity_bytes, uint64_t capture = 1);

// The policies of which the best counts as `name`, chosen when the whole trace is known. Most names have only
// themselves.
std::vector<std::string> Variants(const std::string& name);

}  // namespace ashlar::replay
