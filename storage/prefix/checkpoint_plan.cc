// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/checkpoint_plan.h"

#include <algorithm>

namespace ashlar::storage {
namespace {

struct Line {
  double slope, intercept;
  uint32_t from;
  double At(double x) const { return slope * x + intercept; }
};

// Returns whether `middle`, with a slope between the others', is nowhere below both.
bool Hidden(const Line& before, const Line& middle, const Line& after) {
  return (after.intercept - before.intercept) * (before.slope - middle.slope) <=
         (middle.intercept - before.intercept) * (before.slope - after.slope);
}

}  // namespace

CheckpointPlan::CheckpointPlan(std::span<const OverlapModel::Mass> model, uint64_t begin, uint64_t page, size_t most,
                               Cost cost) {
  at_.push_back(begin);
  for (const OverlapModel::Mass& mass : model) {
    const uint64_t at = mass.depth / page * page;
    if (at > at_.back()) at_.push_back(at);
  }
  // A depth after all masses.
  at_.push_back(std::max(at_.back(), model.empty() ? 0 : model.back().depth) + 1);
  size_t next = 0;
  double mass = 0, sum = 0;
  for (const uint64_t at : at_) {
    for (; next < model.size() && model[next].depth < at; ++next) {
      mass += model[next].weight;
      sum += model[next].weight * cost(model[next].depth);
    }
    cost_.push_back(cost(at));
    mass_.push_back(mass);
    sum_.push_back(sum);
    layer_.push_back(sum - cost_.front() * mass);
  }
  expected_.push_back(layer_.back());
  most = std::min(most, at_.size() - 2);
  while (expected_.size() <= most) AddLayer();
}

void CheckpointPlan::AddLayer() {
  std::vector<double> layer(at_.size(), 0);
  std::vector<uint32_t> from(at_.size(), 0);
  std::vector<Line> hull;
  size_t best = 0;
  for (size_t j = 1; j < at_.size(); ++j) {
    const size_t i = j - 1;
    const Line line{-cost_[i], layer_[i] - sum_[i] + cost_[i] * mass_[i], static_cast<uint32_t>(i)};
    while (hull.size() >= 2 && Hidden(hull[hull.size() - 2], hull.back(), line)) hull.pop_back();
    hull.push_back(line);
    best = std::min(best, hull.size() - 1);
    while (best + 1 < hull.size() && hull[best + 1].At(mass_[j]) <= hull[best].At(mass_[j])) ++best;
    layer[j] = hull[best].At(mass_[j]) + sum_[j];
    from[j] = hull[best].from;
  }
  layer_ = std::move(layer);
  expected_.push_back(std::min(expected_.back(), layer_.back()));
  from_.push_back(std::move(from));
}

std::vector<uint64_t> CheckpointPlan::Positions(size_t checkpoints) const {
  std::vector<uint64_t> positions;
  size_t at = at_.size() - 1;
  for (size_t m = std::min(checkpoints, most()); m > 0; --m) {
    at = from_[m - 1][at];
    if (at == 0) break;  // fewer suffice
    positions.push_back(at_[at]);
  }
  std::reverse(positions.begin(), positions.end());
  return positions;
}

}  // namespace ashlar::storage
