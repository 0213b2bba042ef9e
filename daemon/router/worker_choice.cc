// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/worker_choice.h"

#include <algorithm>
#include <utility>

namespace ashlar::daemon {

void WorkerChoice::Choose(const PlanAsker& asker, storage::Nanos asker_ready_in, Segments segments,
                          std::function<void(const LptPlan&, const std::vector<WorkerPlace>&)> done) {
  if (elsewhere_ == nullptr || segments.empty()) return ChooseFrom({}, asker, asker_ready_in, segments, done);
  const PrefillWork& first = segments.front()->cold.work;
  elsewhere_->Find(
      first.tenant, first.ns,
      [this, asker, asker_ready_in, segments, done = std::move(done)](const std::vector<RemoteWorker>& remote) {
        ChooseFrom(remote, asker, asker_ready_in, segments, done);
      });
}

void WorkerChoice::ChooseFrom(const std::vector<RemoteWorker>& remote, const PlanAsker& asker,
                              storage::Nanos asker_ready_in, const Segments& segments,
                              const std::function<void(const LptPlan&, const std::vector<WorkerPlace>&)>& done) {
  std::vector<WorkerPlace> places;
  std::vector<LptWorker> workers = {{.ready_in = std::max<storage::Nanos>(0, asker_ready_in)}};
  std::vector<uint64_t> tokens;
  uint64_t bytes = 0;
  for (const auto& segment : segments) {
    tokens.push_back(segment->cold.work.tokens);
    bytes = std::max(bytes, segment->cold.bytes);
  }
  double known = asker.tokens_per_second;
  const auto add = [&](WorkerPlace place, LptWorker worker, uint64_t queued) {
    const bool failed =
        std::ranges::any_of(segments, [&](const auto& segment) { return segment->failed.contains(place); });
    if (failed || worker.capacity == 0) return;
    places.push_back(std::move(place));
    worker.ready_in = static_cast<storage::Nanos>(queued);  // in tokens for now, because the rate may be unknown
    workers.push_back(worker);
    known = std::max(known, worker.tokens_per_second);
  };
  if (!segments.empty()) {
    const PrefillWork& first = segments.front()->cold.work;
    for (const PrefillWorkers::Offer& offer : workers_.Offers(first.tenant, first.ns)) {
      if (offer.session == asker.session) continue;  // it cannot wait and compute
      add({.worker = offer.worker}, {.tokens_per_second = offer.tokens_per_second, .capacity = offer.capacity},
          offer.queued_tokens);
    }
  }
  remote_.clear();
  std::map<std::string, size_t> nodes;
  std::vector<size_t> capacities;  // free slots of the nodes; assigned segments already count
  for (const RemoteWorker& worker : remote) {
    const auto [node, fresh] = nodes.emplace(worker.member->node, capacities.size());
    if (fresh) {
      const auto given = assigned_.find(worker.member->node);
      const size_t taken = given == assigned_.end() ? 0 : given->second;
      capacities.push_back(most_per_node_ - std::min(taken, most_per_node_));
    }
    const WorkerPlace place{.remote = true, .worker = worker.worker, .node = worker.member->node};
    remote_[place] = worker;
    const storage::Nanos transfer = elsewhere_ == nullptr ? 0 : elsewhere_->Estimate(worker, bytes);
    add(place,
        {.tokens_per_second = worker.tokens_per_second,
         .delay = worker.delay + transfer,
         .capacity = worker.capacity,
         .node = node->second},
        worker.queued_tokens);
  }
  if (known <= 0) known = kUnknownRate;
  for (size_t i = 1; i < workers.size(); ++i) {
    if (workers[i].tokens_per_second <= 0) workers[i].tokens_per_second = known;
    workers[i].ready_in = ComputeTime(static_cast<uint64_t>(workers[i].ready_in), workers[i].tokens_per_second);
  }
  if (asker.computes) workers[0].tokens_per_second = asker.tokens_per_second > 0 ? asker.tokens_per_second : known;
  done(PlanLpt(tokens, workers, capacities), places);
}

void WorkerChoice::AssignElsewhere(const WorkerPlace& place, const PrefillWork& work, storage::Nanos patience,
                                   std::function<void(const absl::Status&)> done) {
  ++assigned_[place.node];
  elsewhere_->Prefill(remote_.at(place), work, patience,
                      [this, node = place.node, done = std::move(done)](const absl::Status& status) {
                        if (--assigned_[node] == 0) assigned_.erase(node);
                        done(status);
                      });
}

}  // namespace ashlar::daemon
