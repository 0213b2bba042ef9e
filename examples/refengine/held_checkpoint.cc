// SPDX-License-Identifier: Apache-2.0
#include "examples/refengine/held_checkpoint.h"

#include <algorithm>
#include <utility>

namespace ashlar::refengine {

std::vector<Snapshot> SnapshotAt(int64_t start, std::span<const int64_t> depths, std::vector<Step>& chain) {
  std::vector<Snapshot> snapshots;
  snapshots.reserve(depths.size());  // steps point into it
  std::vector<Step> cut;
  auto next = std::upper_bound(depths.begin(), depths.end(), start);
  const auto take = [&](Step& step) { step.snapshot = &snapshots.emplace_back(Snapshot{*next++, {}}).state; };
  for (Step rest : chain) {
    const int64_t end = start + rest.count();
    while (next != depths.end() && *next < end) {
      if (!rest.cached.empty()) {
        ++next;
        continue;
      }
      const auto tokens = static_cast<size_t>(*next - start);
      start = *next;
      take(cut.emplace_back(Step::Compute(rest.tokens.first(tokens))));
      rest.tokens = rest.tokens.subspan(tokens);
    }
    cut.push_back(rest);
    if (next != depths.end() && *next == end) take(cut.back());
    start = end;
  }
  chain = std::move(cut);
  return snapshots;
}

HeldCheckpoint::HeldCheckpoint(const ModelConfig& config, RecurrentState state)
    : state_(std::make_unique<RecurrentState>(std::move(state))), tables_(config) {
  for (int32_t layer = 0; layer < config.layers(); ++layer) {
    if (config.is_attention(layer)) continue;
    const int32_t linear = config.kind_index(layer);
    PointAt(config.linear, nullptr, state_->State(linear).data(), tables_.heads(layer));
    tables_[layer].conv_tail = state_->ConvWindow(linear).data();
  }
}

}  // namespace ashlar::refengine
