// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/lpt.h"

#include <algorithm>
#include <numeric>

namespace ashlar::daemon {
namespace {

storage::Nanos ReadyAfter(const LptWorker& worker, uint64_t tokens) {
  return std::min(kLongestCompute, worker.ready_in + ComputeTime(tokens, worker.tokens_per_second));
}

// Assigns every segment to a worker, in this order.
LptPlan Share(std::span<const uint64_t> tokens, std::span<const size_t> order, std::span<const LptWorker> workers,
              std::span<const size_t> capacities) {
  LptPlan plan{.worker = std::vector<size_t>(tokens.size(), LptPlan::kUnassigned),
               .ends = std::vector<storage::Nanos>(tokens.size(), 0)};
  std::vector<LptWorker> now(workers.begin(), workers.end());
  std::vector<size_t> capacity_at(capacities.begin(), capacities.end());
  const auto full = [&](const LptWorker& worker) {
    return worker.capacity == 0 || (worker.node != LptWorker::kNoNode && capacity_at[worker.node] == 0);
  };
  for (const size_t segment : order) {
    size_t best = LptPlan::kUnassigned;
    storage::Nanos best_end = 0;
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i].tokens_per_second <= 0 || full(now[i])) continue;
      const storage::Nanos end = ReadyAfter(now[i], tokens[segment]) + now[i].delay;
      if (best != LptPlan::kUnassigned && end >= best_end) continue;
      best = i;
      best_end = end;
    }
    if (best == LptPlan::kUnassigned) continue;
    now[best].ready_in = ReadyAfter(now[best], tokens[segment]);
    --now[best].capacity;
    if (now[best].node != LptWorker::kNoNode) --capacity_at[now[best].node];
    plan.worker[segment] = best;
    plan.ends[segment] = best_end;
    plan.ends_at = std::max(plan.ends_at, best_end);
  }
  return plan;
}

}  // namespace

storage::Nanos ComputeTime(uint64_t tokens, double tokens_per_second) {
  const double nanos = static_cast<double>(tokens) / tokens_per_second * 1e9;
  return static_cast<storage::Nanos>(std::min(nanos, static_cast<double>(kLongestCompute)));
}

LptPlan PlanLpt(std::span<const uint64_t> tokens, std::span<const LptWorker> workers,
                std::span<const size_t> capacities) {
  std::vector<size_t> order(tokens.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater{}, [&](size_t segment) { return tokens[segment]; });
  LptPlan shared = Share(tokens, order, workers, capacities);
  if (workers.empty() || workers[0].tokens_per_second <= 0 || workers[0].capacity < tokens.size()) return shared;
  LptPlan alone = Share(tokens, order, workers.first(1), capacities);
  return alone.ends_at <= shared.ends_at ? alone : shared;
}

}  // namespace ashlar::daemon
