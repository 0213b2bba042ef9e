// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/checkpoint_plan.h"

#include <algorithm>
#include <utility>

namespace ashlar::storage {

// Returns whether the line `middle`, whose slope is between the other two, is never below both.
bool CheckpointPlan::Hidden(const Line& before, const Line& middle, const Line& after) {
  return (after.intercept - before.intercept) * (before.slope - middle.slope) <=
         (middle.intercept - before.intercept) * (before.slope - after.slope);
}

CheckpointPlan::CheckpointPlan(std::span<const OverlapForecast::Mass> model, uint64_t begin, uint64_t page, size_t most,
                               Cost cost) {
  at_.reserve(model.size() + 2);
  at_.push_back(begin);
  for (const OverlapForecast::Mass& mass : model) {
    const uint64_t at = mass.depth / page * page;
    if (at > at_.back()) at_.push_back(at);
  }
  // A depth after all masses.
  at_.push_back(std::max(at_.back(), model.empty() ? 0 : model.back().depth) + 1);
  for (std::vector<double>* const each : {&cost_, &mass_, &sum_, &layer_}) each->reserve(at_.size());
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
  most_ = std::min(most, at_.size() - 2);
}

void CheckpointPlan::AddLayer() {
  next_.assign(at_.size(), 0);
  std::vector<uint32_t> from(at_.size(), 0);
  hull_.clear();
  size_t best = 0;
  for (size_t j = 1; j < at_.size(); ++j) {
    const size_t i = j - 1;
    const Line line{-cost_[i], layer_[i] - sum_[i] + cost_[i] * mass_[i], static_cast<uint32_t>(i)};
    while (hull_.size() >= 2 && Hidden(hull_[hull_.size() - 2], hull_.back(), line)) hull_.pop_back();
    hull_.push_back(line);
    best = std::min(best, hull_.size() - 1);
    while (best + 1 < hull_.size() && hull_[best + 1].At(mass_[j]) <= hull_[best].At(mass_[j])) ++best;
    next_[j] = hull_[best].At(mass_[j]) + sum_[j];
    from[j] = hull_[best].from;
  }
  std::swap(layer_, next_);
  expected_.push_back(std::min(expected_.back(), layer_.back()));
  from_.push_back(std::move(from));
}

double CheckpointPlan::Expected(size_t checkpoints) {
  while (expected_.size() <= checkpoints) AddLayer();
  return expected_[checkpoints];
}

std::vector<uint64_t> CheckpointPlan::Positions(size_t checkpoints) {
  std::vector<uint64_t> positions;
  size_t at = at_.size() - 1;
  const size_t used = std::min(checkpoints, most());
  while (expected_.size() <= used) AddLayer();
  for (size_t m = used; m > 0; --m) {
    at = from_[m - 1][at];
    if (at == 0) break;  // fewer suffice
    positions.push_back(at_[at]);
  }
  std::reverse(positions.begin(), positions.end());
  return positions;
}

}  // namespace ashlar::storage
