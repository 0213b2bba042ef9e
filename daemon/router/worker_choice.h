// SPDX-License-Identifier: Apache-2.0
// WorkerChoice: chooses which engines, on this and other nodes, compute which segments.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/router/cold_segment.h"
#include "daemon/router/elsewhere.h"
#include "daemon/router/lpt.h"
#include "daemon/router/prefill_workers.h"
#include "storage/ids.h"

namespace ashlar::daemon {

// The engine that requests a plan.
struct PlanAsker {
  storage::SessionId session = 0;
  storage::TenantId tenant = 0;
  double tokens_per_second = 0;  // 0 if unknown
  bool computes = true;          // false for a warm-up, which only other engines compute
};

struct WorkerPlace {
  bool remote = false;
  uint64_t worker = 0;
  std::string node;
  auto operator<=>(const WorkerPlace&) const = default;
};

struct SegmentToAssign {
  ColdSegment cold;
  std::set<WorkerPlace> failed;  // workers that are not tried again
};

// Knows the workers of other nodes as offered at the last choice, and how many segments each node has been assigned,
// because a node's connection also carries other calls. The metadata thread only.
class WorkerChoice {
 public:
  // `most_per_node`: segments assigned to another node at a time. The workers must outlive the object.
  WorkerChoice(const PrefillWorkers& workers, size_t most_per_node)
      : workers_(workers), most_per_node_(most_per_node) {}
  // Call once, before any choice. Null outside a cluster.
  void Attach(PrefillElsewhere* elsewhere) { elsewhere_ = elsewhere; }

  using Segments = std::vector<std::shared_ptr<const SegmentToAssign>>;
  // Calls `done` with a plan whose worker 0 is the asker, and whose others are `places`, shifted by one. The segments
  // must be of one namespace. `asker_ready_in`: time until the asker has computed what it has.
  void Choose(const PlanAsker& asker, storage::Nanos asker_ready_in, Segments segments,
              std::function<void(const LptPlan&, const std::vector<WorkerPlace>&)> done);
  // Lets a remote worker of the last choice compute a segment, as PrefillElsewhere::Prefill.
  void AssignElsewhere(const WorkerPlace& place, const PrefillWork& work, storage::Nanos patience,
                       std::function<void(const absl::Status&)> done);

 private:
  void ChooseFrom(const std::vector<RemoteWorker>& remote, const PlanAsker& asker, storage::Nanos asker_ready_in,
                  const Segments& segments,
                  const std::function<void(const LptPlan&, const std::vector<WorkerPlace>&)>& done);

  const PrefillWorkers& workers_;
  const size_t most_per_node_;
  PrefillElsewhere* elsewhere_ = nullptr;
  std::map<WorkerPlace, RemoteWorker> remote_;
  std::map<std::string, size_t> assigned_;  // segments assigned to each node
};

}  // namespace ashlar::daemon
