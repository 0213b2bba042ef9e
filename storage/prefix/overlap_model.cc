// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/overlap_model.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace ashlar::storage {
namespace {

constexpr double kLargestUnit = 1e100;
constexpr double kLeastShare = 0.02, kMostLogOdds = 30;

double LogLikelihood(double share, double observed) {
  return std::log((share * observed + 0.1) / (observed + 1));
}

}  // namespace

void OverlapModel::Histogram::Add(uint64_t at) {
  unit_ /= 1 - kDecay;
  weights_[at] += unit_;
  total_ += unit_;
  if (unit_ > kLargestUnit) {
    for (auto& [place, weight] : weights_) weight /= unit_;
    total_ /= unit_;
    unit_ = 1;
  }
  if (weights_.size() > kMostDepths) Prune();
}

void OverlapModel::Histogram::Prune() {
  std::vector<double> sorted;
  for (const auto& [place, weight] : weights_) sorted.push_back(weight);
  const auto middle = sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  std::erase_if(weights_, [least = *middle](const auto& item) { return item.second <= least; });
  total_ = 0;
  for (const auto& [place, weight] : weights_) total_ += weight;
}

double OverlapModel::Histogram::Share(uint64_t first, uint64_t last) const {
  if (total_ <= 0) return 0;
  double weight = 0;
  for (auto at = weights_.lower_bound(first); at != weights_.end() && at->first <= last; ++at) weight += at->second;
  return weight / total_;
}

void OverlapModel::Observe(uint64_t depth, uint64_t length) {
  const uint64_t behind = length > depth ? length - depth : 0;
  const auto near = [](const Histogram& histogram, uint64_t at) {
    return histogram.Share(at > kNear ? at - kNear : 0, at + kNear);
  };
  const auto observed = static_cast<double>(observed_);
  start_foresight_ = start_foresight_ * kForesight + LogLikelihood(near(from_start_, depth), observed);
  end_foresight_ = end_foresight_ * kForesight + LogLikelihood(near(from_end_, behind), observed);
  from_start_.Add(depth);
  from_end_.Add(behind);
  ++observed_;
}

std::vector<OverlapModel::Mass> OverlapModel::Between(uint64_t begin, uint64_t length) const {
  if (observed_ == 0) return {};
  const double odds = std::clamp(end_foresight_ - start_foresight_, -kMostLogOdds, kMostLogOdds);
  const double start_share = std::clamp(1 / (1 + std::exp(odds)), kLeastShare, 1 - kLeastShare);
  std::vector<Mass> masses;
  const auto add = [&masses](uint64_t depth, double weight) {
    if (masses.empty() || masses.back().depth != depth) masses.push_back({depth, 0});
    masses.back().weight += weight;
  };
  if (length <= begin) return masses;
  // Both are sorted by depth; the nearest to the end is last.
  const auto &starts = from_start_.weights(), &ends = from_end_.weights();
  auto start = starts.upper_bound(begin);
  const auto last_start = starts.upper_bound(length);
  auto end = std::make_reverse_iterator(ends.lower_bound(length - begin));
  while (start != last_start || end != ends.rend()) {
    const bool starts_first = end == ends.rend() || (start != last_start && start->first <= length - end->first);
    if (starts_first) {
      add(start->first, start_share * start->second / from_start_.total());
      ++start;
    } else {
      add(length - end->first, (1 - start_share) * end->second / from_end_.total());
      ++end;
    }
  }
  return masses;
}

}  // namespace ashlar::storage
