// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/overlap_model.h"

#include <algorithm>
#include <cmath>
#include <iterator>

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
  const auto place = std::ranges::lower_bound(pieces_, at, {}, &Piece::at);
  if (place != pieces_.end() && place->at == at) {
    place->weight += unit_;
  } else {
    pieces_.insert(place, {at, unit_});
  }
  total_ += unit_;
  if (unit_ > kLargestUnit) {
    for (Piece& piece : pieces_) piece.weight /= unit_;
    total_ /= unit_;
    unit_ = 1;
  }
  if (pieces_.size() > kMostDepths) Prune();
}

void OverlapModel::Histogram::Prune() {
  std::vector<double> sorted;
  sorted.reserve(pieces_.size());
  for (const Piece& piece : pieces_) sorted.push_back(piece.weight);
  const auto middle = sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  std::erase_if(pieces_, [least = *middle](const Piece& piece) { return piece.weight <= least; });
  total_ = 0;
  for (const Piece& piece : pieces_) total_ += piece.weight;
}

double OverlapModel::Histogram::Share(uint64_t first, uint64_t last) const {
  if (total_ <= 0) return 0;
  double weight = 0;
  auto at = std::ranges::lower_bound(pieces_, first, {}, &Piece::at);
  for (; at != pieces_.end() && at->at <= last; ++at) weight += at->weight;
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

OverlapForecast OverlapModel::Forecast(size_t parts, bool guess) const {
  OverlapForecast forecast;
  if (observed_ == 0) return forecast;
  const double odds = std::clamp(end_foresight_ - start_foresight_, -kMostLogOdds, kMostLogOdds);
  const double start_share = std::clamp(1 / (1 + std::exp(odds)), kLeastShare, 1 - kLeastShare);
  const double guessed = guess ? 1 / (static_cast<double>(observed_) + 1) : 0;
  const auto divide = [parts, guess, guessed](const Histogram& histogram, double share, bool nearest_first,
                                              auto& divided) {
    const double scale = share * (1 - guessed) / histogram.total(), most = share / static_cast<double>(parts);
    for (const Piece& piece : histogram.pieces()) {
      const double weight = piece.weight * scale;
      if (divided.empty() || divided.back().weight + weight > most) {
        divided.push_back({piece.at, weight});
      } else {
        // A checkpoint at the range's least depth, or largest distance from the end, serves all of it.
        if (!nearest_first) divided.back().at = piece.at;
        divided.back().weight += weight;
      }
    }
    if (!guess) return;
    for (size_t i = 0; i < kDoublings; ++i) divided.push_back({uint64_t{1} << i, share * guessed / kDoublings});
    std::ranges::stable_sort(divided, {}, &Piece::at);
  };
  divide(from_start_, start_share, true, forecast.from_start_);
  divide(from_end_, 1 - start_share, false, forecast.from_end_);
  return forecast;
}

std::vector<OverlapForecast::Mass> OverlapForecast::Within(uint64_t length) const {
  std::vector<Mass> masses;
  if (length == 0) return masses;
  // Both are sorted by depth; the nearest to the end is last.
  auto start = std::ranges::upper_bound(from_start_, uint64_t{0}, {}, &Piece::at);
  const auto last_start = std::ranges::upper_bound(from_start_, length, {}, &Piece::at);
  auto end = std::make_reverse_iterator(std::ranges::lower_bound(from_end_, length, {}, &Piece::at));
  masses.reserve(static_cast<size_t>((last_start - start) + (from_end_.rend() - end)));
  while (start != last_start || end != from_end_.rend()) {
    const bool starts_first = end == from_end_.rend() || (start != last_start && start->at <= length - end->at);
    if (starts_first) {
      masses.push_back({.depth = start->at, .weight = start->weight});
      ++start;
    } else {
      masses.push_back({.depth = length - end->at, .weight = end->weight, .from_end = true});
      ++end;
    }
  }
  return masses;
}

}  // namespace ashlar::storage
