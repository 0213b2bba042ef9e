// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/checkpoint_plan.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace ashlar::storage {
namespace {

constexpr uint64_t kGridShare = 256;

}  // namespace

uint64_t CheckpointGrid(uint64_t depth, uint64_t capture_tokens) {
  const uint64_t captures = depth / kGridShare / capture_tokens;
  return std::bit_floor(std::max<uint64_t>(captures, 1)) * capture_tokens;
}

// Returns whether the line `middle`, whose slope is between the other two, is never below both.
bool CheckpointPlan::Hidden(const Line& before, const Line& middle, const Line& after) {
  return (after.intercept - before.intercept) * (before.slope - middle.slope) <=
         (middle.intercept - before.intercept) * (before.slope - after.slope);
}

CheckpointPlan::CheckpointPlan(std::vector<OverlapForecast::Mass> model, uint64_t tokens, uint64_t page, size_t most,
                               Cost cost)
    : model_(std::move(model)), tokens_(tokens), most_(most) {
  std::vector<double> costs, mass, sum;  // C(y), P, D
  double masses = 0, sums = 0;
  uint64_t last = kNowhere;
  for (uint32_t i = 0; i < model_.size(); ++i) {
    const uint64_t at = model_[i].depth / page * page;
    if (at != last) {
      begin_.push_back(i);
      costs.push_back(cost(at));
      mass.push_back(masses);
      sum.push_back(sums);
      last = at;
    }
    masses += model_[i].weight;
    sums += model_[i].weight * cost(model_[i].depth);
  }
  begin_.push_back(static_cast<uint32_t>(model_.size()));
  most_ = std::min(most_, points());
  left_.reserve(most_ * points());
  next_.reserve(most_ * points());
  for (size_t j = 0; j < points() && most_ > 0; ++j) {
    left_.push_back(sums - sum[j] - costs[j] * (masses - mass[j]));
    next_.push_back(static_cast<uint16_t>(j));
  }
  for (size_t m = 1; m < most_; ++m) AddLayer(m, costs, mass, sum);
}

void CheckpointPlan::AddLayer(size_t checkpoints, const std::vector<double>& costs, const std::vector<double>& mass,
                              const std::vector<double>& sum) {
  const size_t layer = left_.size();
  left_.resize(layer + points());
  next_.resize(layer + points());
  std::vector<Line> hull;
  size_t best = 0;
  for (size_t j = points(); j-- > 0;) {
    double& left = left_[layer + j] = Left(checkpoints - 1, j);
    uint16_t& next = next_[layer + j] = Next(checkpoints - 1, j);
    if (j + 1 == points()) continue;
    const Line line{mass[j + 1], sum[j + 1] + Left(checkpoints - 1, j + 1), static_cast<uint16_t>(j + 1)};
    while (hull.size() >= 2 && Hidden(hull[hull.size() - 2], hull.back(), line)) hull.pop_back();
    hull.push_back(line);
    best = std::min(best, hull.size() - 1);
    while (best + 1 < hull.size() && hull[best + 1].At(-costs[j]) <= hull[best].At(-costs[j])) ++best;
    const double cost = hull[best].At(-costs[j]) - sum[j] + costs[j] * mass[j];
    if (cost >= left) continue;
    left = cost;
    next = hull[best].to;
  }
}

uint64_t CheckpointPlan::DepthIn(uint64_t tokens, const OverlapForecast::Mass& mass) const {
  if (!mass.from_end) return mass.depth <= tokens ? mass.depth : kNowhere;
  const uint64_t distance = tokens_ - mass.depth;
  return distance <= tokens ? tokens - distance : kNowhere;
}

CheckpointPlan::Placement CheckpointPlan::For(const Prompt& prompt, uint64_t page, Cost cost) const {
  Placement placement;
  placement.plan_ = this;
  placement.points_.reserve(points());
  const double base = cost(prompt.resume);
  double mass = 0, sum = 0;
  for (uint32_t j = 0; j < points(); ++j) {
    const double before = sum - base * mass;
    uint64_t at = kNowhere, last = 0;
    double known = 0;  // cost of this point's masses in the known part, from which nothing diverges
    for (uint32_t i = begin_[j]; i < begin_[j + 1]; ++i) {
      const uint64_t depth = DepthIn(prompt.tokens, model_[i]);
      if (depth == kNowhere) continue;
      if (at == kNowhere) at = depth / page * page;
      last = std::max(last, depth);
      const double weight = model_[i].weight, flops = cost(depth);
      if (depth > prompt.shared) {
        mass += weight;
        sum += weight * flops;
      } else if (depth > at) {
        known += weight * (flops - cost(at));
      }
    }
    if (last > prompt.shared && at > prompt.resume) placement.points_.push_back({j, at, before - known});
  }
  placement.none_ = sum - base * mass;
  return placement;
}

uint64_t CheckpointPlan::bytes() const {
  return sizeof(*this) + model_.capacity() * sizeof(model_[0]) + begin_.capacity() * sizeof(begin_[0]) +
         left_.capacity() * sizeof(left_[0]) + next_.capacity() * sizeof(next_[0]);
}

size_t CheckpointPlan::Placement::most() const {
  return plan_ == nullptr ? 0 : std::min(plan_->most_, points_.size());
}

const CheckpointPlan::Placement::Point* CheckpointPlan::Placement::Best(size_t checkpoints, double& least) const {
  least = none_;
  const Point* best = nullptr;
  const size_t more = std::min(checkpoints, most());
  for (const Point& first : points_) {
    if (more == 0) break;
    const double cost = first.before + plan_->Left(more - 1, first.index);
    if (cost >= least) continue;
    least = cost;
    best = &first;
  }
  return best;
}

double CheckpointPlan::Placement::Expected(size_t checkpoints) const {
  double least = 0;
  Best(checkpoints, least);
  return least;
}

std::vector<uint64_t> CheckpointPlan::Placement::Positions(size_t checkpoints) const {
  std::vector<uint64_t> positions;
  double least = 0;
  const Point* const first = Best(checkpoints, least);
  if (first == nullptr) return positions;
  uint32_t point = first->index;
  for (size_t more = std::min(checkpoints, most()); more > 0; --more) {
    const auto found = std::ranges::lower_bound(points_, point, {}, &Point::index);
    if (found != points_.end() && found->index == point) positions.push_back(found->at);
    if (more == 1 || plan_->Next(more - 1, point) == point) break;
    point = plan_->Next(more - 1, point);
  }
  std::ranges::sort(positions);
  const auto repeated = std::ranges::unique(positions);
  positions.erase(repeated.begin(), repeated.end());
  return positions;
}

}  // namespace ashlar::storage
