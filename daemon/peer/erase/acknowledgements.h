// SPDX-License-Identifier: Apache-2.0
// Acknowledgements: which nodes have not yet said that they have erased what the cluster is to erase, and for how
// long they have not.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "daemon/observe/cluster_metrics.h"
#include "daemon/peer/directory/directory.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// Present nodes alone are waited for. Ages are by this process's clock, from when it first saw that an erasure waits:
// no clock of another machine is believed. One thread.
class Acknowledgements {
 public:
  // Nodes that are waited for longer than this are named in the log, once for as long as they are the same ones.
  static constexpr storage::Nanos kPatience = storage::Nanos{60} * 1'000'000'000;

  // Both must outlive it.
  Acknowledgements(const Directory& directory, const storage::Clock& clock) : directory_(directory), clock_(clock) {}

  struct Waiting {
    PendingErasures here, elsewhere;  // for this node, and for others
    std::vector<std::string> nodes;   // others that one has waited for longer than kPatience; rising
  };
  // Call it about once a second.
  Waiting Look();

 private:
  using Since = std::map<ClusterErasure::Id, storage::Nanos>;

  const Directory& directory_;
  const storage::Clock& clock_;
  Since here_, elsewhere_;          // since when each waits
  std::vector<std::string> named_;  // in the log
};

}  // namespace ashlar::daemon
