// SPDX-License-Identifier: Apache-2.0
#include "daemon/router/prefill_for_nodes.h"

#include <memory>
#include <utility>

namespace ashlar::daemon {

void PrefillForNodes::Compute(const std::string& node, uint64_t worker, PrefillWork work, storage::Nanos patience,
                              std::function<void(absl::Status)> done) {
  if (stopped_) return done(absl::UnavailableError("the daemon is stopping"));
  if (!cache_.upkeep().inventory().Where(work.tenant, work.key).empty()) return done(absl::OkStatus());
  const auto number = std::make_shared<uint64_t>(0);
  const auto ended = [this, node, number, done](const absl::Status& status) {
    if (const auto of_node = assignments_.find(node); of_node != assignments_.end()) {
      of_node->second.erase(*number);
      if (of_node->second.empty()) assignments_.erase(of_node);
    }
    done(status);
  };
  *number = workers_.Assign(worker, std::move(work), clock_.Now() + patience, ended);
  if (*number == 0) return done(absl::ResourceExhaustedError("the worker has disconnected, or its queue is full"));
  assignments_[node].insert(*number);
}

void PrefillForNodes::NodeGone(const std::string& node) {
  const auto gone = assignments_.extract(node);
  if (gone.empty()) return;
  for (const uint64_t assignment : gone.mapped())
    workers_.Cancel(assignment, absl::CancelledError("the requesting node has disconnected"));
}

}  // namespace ashlar::daemon
