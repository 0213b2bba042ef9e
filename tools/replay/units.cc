// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/units.h"

namespace ashlar::replay {

storage::PrefixCosts InUnits(const storage::PrefixCosts& costs, uint64_t unit) {
  const auto tokens = static_cast<double>(unit);
  return {.page_tokens = 1,
          .page_bytes = (unit * costs.page_bytes + costs.page_tokens - 1) / costs.page_tokens,
          .checkpoint_bytes = costs.checkpoint_bytes,
          .flops_per_token = costs.flops_per_token * tokens,
          .flops_per_square = costs.flops_per_square * tokens * tokens};
}

storage::PrefixCosts InPages(const storage::PrefixCosts& costs, uint64_t page) {
  storage::PrefixCosts paged = costs;
  const uint64_t merged = (page + costs.page_tokens - 1) / costs.page_tokens;  // earlier pages per page
  paged.page_tokens *= merged;
  paged.page_bytes *= merged;
  return paged;
}

uint64_t UnitPolicy::Request(std::span<const int32_t> tokens, uint64_t prompt) {
  if (unit_ == 1) return inside_->Request(tokens, prompt);
  units_.clear();
  for (uint64_t begin = 0; begin + unit_ <= tokens.size(); begin += unit_) {
    const auto unit = tokens.subspan(begin, unit_);
    const auto number = static_cast<int32_t>(numbers_.size());
    units_.push_back(numbers_.try_emplace({unit.begin(), unit.end()}, number).first->second);
  }
  return inside_->Request(units_, prompt / unit_) * unit_;
}

}  // namespace ashlar::replay
