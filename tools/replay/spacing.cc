// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/spacing.h"

#include <algorithm>
#include <cmath>

namespace ashlar::replay {

std::vector<uint64_t> Space(Spacing spacing, uint64_t length, uint64_t page, size_t checkpoints) {
  std::vector<uint64_t> positions;
  const auto put = [&](double depth) {
    const uint64_t at = static_cast<uint64_t>(depth) / page * page;
    if (at > (positions.empty() ? 0 : positions.back()) && at < length) positions.push_back(at);
  };
  const auto n = static_cast<double>(checkpoints);
  const auto whole = static_cast<double>(length);
  uint64_t block = page;
  while ((std::max<uint64_t>(length, 1) - 1) / block > checkpoints) block *= 2;
  for (size_t i = 1; i <= checkpoints; ++i) {
    const auto k = static_cast<double>(i);
    switch (spacing) {
      case Spacing::kBalanced:
        put(whole * k / (n + 1));
        break;
      case Spacing::kBlock:
        put(static_cast<double>(block * i));
        break;
      case Spacing::kRoot:
        put(whole * std::sqrt(k / (n + 1)));
        break;
      case Spacing::kLogarithmic:
        put(whole * std::exp2(k - n - 1));
        break;
    }
  }
  return positions;
}

}  // namespace ashlar::replay
