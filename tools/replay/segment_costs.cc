// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/segment_costs.h"

#include <cmath>
#include <iterator>
#include <utility>

namespace ashlar::replay {
namespace {

// The fraction of a gated delta rule's transitions that is stored. The others vanish over `tokens` tokens: heads as
// initialised, ε = 3e-4 (docs/benchmarks/transitions.md). Models of other families count with the same fraction; KDA's
// would be 1 at 64 tokens, 0.59 at 256 and 0.08 at 1,024.
double StoredShare(uint64_t tokens) {
  static constexpr std::pair<double, double> kMeasured[] = {{64, 0.75},    {128, 0.625},  {256, 0.367}, {512, 0.25},
                                                            {1024, 0.156}, {2048, 0.031}, {4096, 0}};
  const auto length = static_cast<double>(tokens);
  if (length <= kMeasured[0].first) return kMeasured[0].second;
  for (size_t i = 1; i < std::size(kMeasured); ++i) {
    const auto& [after, less] = kMeasured[i];
    const auto& [before, more] = kMeasured[i - 1];
    if (length <= after) return more + (less - more) * std::log2(length / before) / std::log2(after / before);
  }
  return 0;
}

}  // namespace

Model Stored(Model model, StateType type) {
  if (type == StateType::kBf16) return model;
  model.costs.checkpoint_bytes *= 2;
  model.transition_bytes *= 2;
  return model;
}

uint64_t SegmentCosts::Transitions(uint64_t tokens) const {
  const auto dense = static_cast<double>(model_.transition_bytes);
  return static_cast<uint64_t>(adaptive_ ? dense * StoredShare(tokens) : dense);
}

bool SegmentCosts::Pays(uint64_t begin, uint64_t end, double link_bytes_per_second) const {
  const double computed = (model_.costs.Flops(end) - model_.costs.Flops(begin)) / model_.flops_per_second;
  return static_cast<double>(Bytes(end - begin)) / link_bytes_per_second < computed;
}

}  // namespace ashlar::replay
