// SPDX-License-Identifier: Apache-2.0
// Acknowledgements: tracks which nodes have not acknowledged an erasure, and for how long.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "daemon/observe/cluster_metrics.h"
#include "daemon/peer/directory/directory.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// Only present nodes count. Ages use this process's clock and start when it first sees an erasure wait, so no other
// machine's clock is trusted. One thread only.
class Acknowledgements {
 public:
  // Nodes that do not acknowledge within this time are logged, once until the set of nodes changes.
  static constexpr storage::Nanos kPatience = storage::Nanos{60} * 1'000'000'000;

  // Both must outlive the object.
  Acknowledgements(const Directory& directory, const storage::Clock& clock) : directory_(directory), clock_(clock) {}

  struct Waiting {
    PendingErasures here, elsewhere;  // waiting for this node, and for others
    std::vector<std::string> nodes;   // other nodes that have not acknowledged within kPatience; ascending
  };
  // Call it about once per second.
  Waiting Look();

 private:
  using Since = std::map<ClusterErasure::Id, storage::Nanos>;

  const Directory& directory_;
  const storage::Clock& clock_;
  Since here_, elsewhere_;          // when each wait began
  std::vector<std::string> named_;  // nodes in the last log line
};

}  // namespace ashlar::daemon
