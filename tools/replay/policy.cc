// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/policy.h"

#include <charconv>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/prefix/prefix_planner.h"
#include "tools/replay/published.h"

namespace ashlar::replay {
namespace {

class NoCache final : public Policy {
 public:
  uint64_t Request(std::span<const int32_t>, uint64_t) override { return 0; }
  Usage usage() const override { return {}; }
};

// The planner that the daemon runs; every checkpoint that it asks for is captured.
class AshlarPolicy final : public Policy {
 public:
  AshlarPolicy(const storage::PrefixCosts& costs, uint64_t capacity_bytes, uint64_t capture_tokens)
      : planner_(costs, {.capacity_bytes = capacity_bytes, .capture_tokens = capture_tokens}) {}

  uint64_t Request(std::span<const int32_t> tokens, uint64_t prompt) override {
    const auto match = planner_.Lookup(tokens.first(prompt));
    planner_.Commit(match, tokens, prompt, match.checkpoint_at);
    return match.resume;
  }
  Usage usage() const override {
    const storage::CheckpointBudget& budget = planner_.budget();
    return {.bytes = budget.bytes(),
            .peak_bytes = budget.peak_bytes(),
            .states = budget.checkpoints(),
            .evictions = budget.evictions(),
            .refusals = budget.refusals()};
  }

 private:
  storage::PrefixPlanner planner_;
};

absl::Status Unknown(const std::string& name, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("policy: ", name, " ", why));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Policy>> MakePolicy(const std::string& name, const storage::PrefixCosts& costs,
                                                   uint64_t capacity_bytes) {
  const size_t colon = name.find(':');
  const std::string kind = name.substr(0, colon), value = colon == std::string::npos ? "" : name.substr(colon + 1);
  double number = 0;
  const auto parsed = std::from_chars(value.data(), value.data() + value.size(), number);
  if (!value.empty() && (parsed.ec != std::errc() || parsed.ptr != value.data() + value.size() || number < 0)) {
    return Unknown(name, "needs a number after the colon");
  }
  const auto tokens = static_cast<uint64_t>(number);
  const bool whole = static_cast<double>(tokens) == number;
  if (kind == "none" && value.empty()) return std::make_unique<NoCache>();
  if (kind == "sglang" && value.empty()) {
    return std::make_unique<MarconiPolicy>(costs, capacity_bytes, MarconiPolicy::Mode::kLru);
  }
  if (kind == "marconi") {
    const auto mode = value.empty() ? MarconiPolicy::Mode::kTuned : MarconiPolicy::Mode::kFixed;
    return std::make_unique<MarconiPolicy>(costs, capacity_bytes, mode, number);
  }
  if (kind == "block") {
    if (!whole || tokens == 0 || tokens % BlockPolicy::kPageTokens != 0) {
      return Unknown(name, absl::StrCat("needs a multiple of ", BlockPolicy::kPageTokens, " tokens"));
    }
    return std::make_unique<BlockPolicy>(costs, capacity_bytes, tokens);
  }
  if (kind == "ashlar") {
    if (!value.empty() && (!whole || tokens == 0)) return Unknown(name, "needs a number of tokens");
    return std::make_unique<AshlarPolicy>(costs, capacity_bytes, value.empty() ? 1 : tokens);
  }
  return Unknown(name, "is unknown; expected none, block:N, sglang, marconi, marconi:ALPHA, ashlar or ashlar:N");
}

}  // namespace ashlar::replay
