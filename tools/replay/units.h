// SPDX-License-Identifier: Apache-2.0
// Units: a trace at the granularity at which an engine can capture states.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "tools/replay/policy.h"

namespace ashlar::replay {

// Costs per unit of `unit` tokens: a unit takes the place of a token, and has its own page.
storage::PrefixCosts InUnits(const storage::PrefixCosts& costs, uint64_t unit);

// Returns the same costs per token, with larger pages: the smallest multiple of the earlier page of at least `page`
// tokens. A checkpoint's partial last page takes as many bytes as a whole one.
storage::PrefixCosts InPages(const storage::PrefixCosts& costs, uint64_t page);

// A policy over whole units: it holds states at multiples of `unit` tokens only, and a prompt can resume only there.
// The policy inside sees a number per unit, the same one for the same tokens, and has the costs of InUnits.
class UnitPolicy final : public Policy {
 public:
  UnitPolicy(uint64_t unit, std::unique_ptr<Policy> inside) : unit_(unit), inside_(std::move(inside)) {}

  uint64_t Request(std::span<const int32_t> tokens, uint64_t prompt) override;
  Usage usage() const override { return inside_->usage(); }
  Tuning tuning() const override { return inside_->tuning(); }

 private:
  const uint64_t unit_;
  const std::unique_ptr<Policy> inside_;
  absl::flat_hash_map<std::vector<int32_t>, int32_t> numbers_;
  std::vector<int32_t> units_;  // units of the current request
};

}  // namespace ashlar::replay
