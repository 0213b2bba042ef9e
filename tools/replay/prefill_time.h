// SPDX-License-Identifier: Apache-2.0
// PrefillTime: how long an engine computes a prompt.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/replay/models.h"

namespace ashlar::replay {

class PrefillTime {
 public:
  // The model's FLOPs at its rate of FLOPs.
  explicit PrefillTime(const Model& model);
  // Measured rates: LENGTH:TOKENS_PER_SECOND, for prompts of LENGTH tokens. Between lengths the time is interpolated;
  // outside of them the rate is that of the nearest. INVALID_ARGUMENT; also if a longer prompt would take less time.
  static absl::StatusOr<PrefillTime> Parse(const std::vector<std::string>& table);

  // Seconds to compute tokens [begin, end) of a prompt.
  double Seconds(uint64_t begin, uint64_t end) const { return Seconds(end) - Seconds(begin); }
  // Mean rate over a prompt.
  double TokensPerSecond(uint64_t tokens) const { return static_cast<double>(tokens) / Seconds(tokens); }

 private:
  PrefillTime() = default;
  double Seconds(uint64_t tokens) const;

  std::map<uint64_t, double> rates_;  // tokens per second by length; empty: by FLOPs
  storage::PrefixCosts costs_;
  double flops_per_second_ = 1;
};

}  // namespace ashlar::replay
