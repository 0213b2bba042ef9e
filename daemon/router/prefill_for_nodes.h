// SPDX-License-Identifier: Apache-2.0
// PrefillForNodes: segments that engines of this node compute for other nodes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "daemon/router/prefill_workers.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// The metadata thread only.
class PrefillForNodes {
 public:
  // All must outlive the object.
  PrefillForNodes(const storage::Clock& clock, storage::Cache& cache, PrefillWorkers& workers)
      : clock_(clock), cache_(cache), workers_(workers) {}

  // Computes a segment here. OK: it is in this node's cache.
  void Compute(const std::string& node, uint64_t worker, PrefillWork work, storage::Nanos patience,
               std::function<void(absl::Status)> done);
  // The node has disconnected: cancels its work.
  void NodeGone(const std::string& node);
  // No work is accepted afterwards. The workers end what was accepted.
  void Stop() { stopped_ = true; }

 private:
  const storage::Clock& clock_;
  storage::Cache& cache_;
  PrefillWorkers& workers_;
  std::map<std::string, std::set<uint64_t>> assignments_;  // keyed by requesting node
  bool stopped_ = false;
};

}  // namespace ashlar::daemon
