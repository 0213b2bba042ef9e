// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/policy.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/prefix/prefix_planner.h"
#include "tools/replay/published.h"
#include "tools/replay/units.h"

namespace ashlar::replay {
namespace {

class NoCache final : public Policy {
 public:
  uint64_t Request(std::span<const int32_t>, uint64_t) override { return 0; }
  Usage usage() const override { return {}; }
};

// The daemon's planner; every checkpoint that it requests is captured. For the cache, a text ends at a multiple of
// `ends`.
class AshlarPolicy final : public Policy {
 public:
  AshlarPolicy(const storage::PrefixCosts& costs, uint64_t capacity_bytes, uint64_t capture_tokens, uint64_t ends)
      : planner_(costs, {.capacity_bytes = capacity_bytes, .capture_tokens = capture_tokens}), ends_(ends) {}

  uint64_t Request(std::span<const int32_t> tokens, uint64_t prompt) override {
    const auto match = planner_.Lookup(tokens.first(prompt));
    const uint64_t end = tokens.size() / ends_ * ends_;
    if (end == 0) {
      planner_.Release(match);
    } else {
      planner_.Commit(match, tokens.first(end), std::min(prompt, end), match.checkpoint_at);
    }
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
  const uint64_t ends_;
};

constexpr uint64_t kPage = 64;            // tokens: what block policies store, or less if their spacing needs it
constexpr uint64_t kLeastVllmBlock = 16;  // tokens

// Per request. vllm-marconi-offload 0.2.2 decays by 0 unless configured, and by 0.005 per scheduler step in its
// example, which is 0.1 at 20 steps per request. Without decay, it keeps objects that were popular only in the past.
constexpr double kOffloadDecay = 0.1;

// The oracle's grid, as in Marconi's published code.
constexpr int kOracleSteps = 20;
constexpr double kOracleStep = 0.1;

absl::Status Unknown(const std::string& name, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("policy: ", name, " ", why));
}

}  // namespace

std::vector<std::string> Variants(const std::string& name) {
  if (name != "marconi:oracle") return {name};
  std::vector<std::string> variants;
  for (int step = 0; step <= kOracleSteps; ++step) variants.push_back(absl::StrCat("marconi:", step * kOracleStep));
  return variants;
}

absl::StatusOr<std::unique_ptr<Policy>> MakePolicy(const std::string& name, const storage::PrefixCosts& costs,
                                                   uint64_t capacity_bytes, uint64_t capture) {
  const size_t colon = name.find(':');
  const std::string kind = name.substr(0, colon), value = colon == std::string::npos ? "" : name.substr(colon + 1);
  double number = 0;
  const auto parsed = std::from_chars(value.data(), value.data() + value.size(), number);
  if (!value.empty() && (parsed.ec != std::errc() || parsed.ptr != value.data() + value.size() || number < 0)) {
    return Unknown(name, "needs a number after the colon");
  }
  const auto tokens = static_cast<uint64_t>(number);
  const bool whole = static_cast<double>(tokens) == number;
  const auto in_units = [](uint64_t unit, auto policy) -> std::unique_ptr<Policy> {
    return std::make_unique<UnitPolicy>(unit, std::move(policy));
  };
  const storage::PrefixCosts unit_costs = InUnits(costs, capture);
  if (kind == "none" && value.empty()) return std::make_unique<NoCache>();
  if (kind == "sglang" && value.empty()) {
    return in_units(capture, std::make_unique<MarconiPolicy>(unit_costs, capacity_bytes, MarconiPolicy::Mode::kLru));
  }
  if (kind == "marconi") {
    const auto mode = value.empty() ? MarconiPolicy::Mode::kTuned : MarconiPolicy::Mode::kFixed;
    return in_units(capture, std::make_unique<MarconiPolicy>(unit_costs, capacity_bytes, mode, number));
  }
  if (kind == "block") {
    if (!whole || tokens == 0 || tokens % kLeastVllmBlock != 0) {
      return Unknown(name, absl::StrCat("needs a multiple of ", kLeastVllmBlock, " tokens"));
    }
    const uint64_t spacing = (tokens + capture - 1) / capture * capture, page = std::gcd(spacing, kPage);
    return in_units(page, std::make_unique<BlockPolicy>(InUnits(costs, page), capacity_bytes, spacing / page));
  }
  if (kind == "sglang-now" && value.empty()) {
    return in_units(capture,
                    std::make_unique<EnginePolicy>(unit_costs, capacity_bytes, EnginePolicy::Rules{.two_pools = true}));
  }
  if (kind == "vllm" || kind == "marconi-offload") {
    const uint64_t block = (kLeastVllmBlock + capture - 1) / capture * capture;
    EnginePolicy::Rules rules{.by_page = true};
    if (kind == "marconi-offload") {
      rules.decay = value.empty() ? kOffloadDecay : number;
    } else if (!whole || tokens % kLeastVllmBlock != 0) {
      return Unknown(name, absl::StrCat("needs a multiple of ", kLeastVllmBlock, " tokens"));
    } else {
      rules.retention = (tokens + block - 1) / block;
    }
    return in_units(block, std::make_unique<EnginePolicy>(InUnits(costs, block), capacity_bytes, rules));
  }
  if (kind == "ashlar") {
    if (!value.empty() && (!whole || tokens == 0)) return Unknown(name, "needs a number of tokens");
    return std::make_unique<AshlarPolicy>(costs, capacity_bytes, value.empty() ? capture : std::lcm(tokens, capture),
                                          capture);
  }
  return Unknown(name,
                 "is unknown; expected none, block:N, sglang, sglang-now, vllm, vllm:N, marconi, marconi:ALPHA, "
                 "marconi:oracle, marconi-offload, marconi-offload:DECAY, ashlar or ashlar:N");
}

}  // namespace ashlar::replay
