// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/optimum.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "storage/prefix/prefix_tree.h"

namespace ashlar::replay {
namespace {

constexpr int kRounds = 400;
constexpr double kLeastPrice = 1e-9;  // tokens
constexpr double kStep = 0.5;         // of the first round, in the logarithm of a price

struct LastRequest {
  size_t request = 0;
};

}  // namespace

Optimum::Optimum(const Trace& trace, const storage::PrefixCosts& costs, uint64_t capture) : costs_(costs) {
  using Tree = storage::PrefixTree<LastRequest>;
  Tree tree;
  std::vector<int32_t> tokens;
  for (const Trace::Request& request : trace.requests()) {
    const uint64_t prompt = trace.Tokens(request, tokens);
    tokens_ += static_cast<double>(prompt);
    std::vector<Run> runs;
    const auto add = [&](uint64_t begin, uint64_t end, size_t last) {
      if (!runs.empty() && runs.back().last == last) {
        runs.back().end = end;
      } else if (end > begin) {
        runs.push_back({.begin = begin, .end = end, .last = last});
      }
    };
    const auto reached = tree.Walk(std::span(tokens).first(prompt),
                                   [&](Tree::Node& node) { add(node.begin(), node.depth(), node.data.request); });
    if (reached.inside != nullptr) add(reached.node->depth(), reached.depth, reached.inside->data.request);
    for (Run& run : runs) {
      const uint64_t depth = run.end / capture * capture;
      run.resume = depth > run.begin ? depth : 0;
    }
    const auto inserted = tree.Insert(tokens);
    const size_t now = shared_.size();
    for (auto* node = inserted.node; node->parent() != nullptr; node = node->parent()) node->data.request = now;
    shared_.push_back(std::move(runs));
  }
}

double Optimum::Bound(uint64_t capacity_bytes, const std::vector<double>& prices, std::vector<double>* use) const {
  const auto capacity = static_cast<double>(capacity_bytes);
  const double token = static_cast<double>(costs_.page_bytes) / static_cast<double>(costs_.page_tokens) / capacity;
  const double state = static_cast<double>(costs_.checkpoint_bytes) / capacity;
  std::vector<double> before(prices.size() + 1, 0);  // sum of the prices before a request
  for (size_t t = 0; t < prices.size(); ++t) before[t + 1] = before[t] + prices[t];
  if (use != nullptr) use->assign(prices.size() + 1, 0);
  double bound = before.back();
  for (size_t i = 0; i < shared_.size(); ++i) {
    double most = 0, paid = 0;
    size_t best = 0;  // number of runs that are hit
    for (size_t k = 0; k < shared_[i].size(); ++k) {
      const Run& run = shared_[i][k];
      const double price = before[i] - before[run.last];
      if (run.resume > 0) {
        const double own = token * static_cast<double>(run.resume - run.begin) + state;
        const double gains = static_cast<double>(run.resume) - paid - own * price;
        if (gains > most) {
          most = gains;
          best = k + 1;
        }
      }
      paid += token * static_cast<double>(run.end - run.begin) * price;
    }
    bound += most;
    if (use == nullptr) continue;
    for (size_t k = 0; k < best; ++k) {
      const Run& run = shared_[i][k];
      const bool last = k + 1 == best;
      const double bytes = token * static_cast<double>((last ? run.resume : run.end) - run.begin) + (last ? state : 0);
      (*use)[run.last] += bytes;
      (*use)[i] -= bytes;
    }
  }
  if (use == nullptr) return bound;
  for (size_t t = 1; t < use->size(); ++t) (*use)[t] += (*use)[t - 1];
  return bound;
}

double Optimum::TokenHitRate(uint64_t capacity_bytes) const {
  std::vector<double> prices(shared_.size(), 0), use;
  double least = Bound(capacity_bytes, prices, nullptr);  // an unlimited cache
  // The search begins with the best of the prices that are the same at all times.
  const double typical = tokens_ / static_cast<double>(shared_.size());
  double common = 0, least_common = std::numeric_limits<double>::infinity();
  for (double price = typical * 64; price > typical * 1e-4; price /= 2) {
    const double bound = Bound(capacity_bytes, std::vector<double>(prices.size(), price), nullptr);
    if (bound >= least_common) continue;
    least_common = bound;
    common = price;
  }
  prices.assign(prices.size(), common);
  std::vector<double> mean(prices.size(), 0);
  double weight = 0;
  for (int round = 0; round < kRounds; ++round) {
    least = std::min(least, Bound(capacity_bytes, prices, &use));
    const double step = kStep / std::sqrt(1 + round / 4.0);
    for (size_t t = 0; t < prices.size(); ++t) {
      mean[t] += step * prices[t];
      prices[t] = std::max(prices[t] * std::exp(step * std::clamp(use[t] - 1, -1.0, 1.0)), kLeastPrice);
    }
    weight += step;
    if (round % 20 != 19) continue;
    std::vector<double> settled(mean);
    for (double& price : settled) price /= weight;
    least = std::min(least, Bound(capacity_bytes, settled, nullptr));
  }
  return least / tokens_;
}

}  // namespace ashlar::replay
