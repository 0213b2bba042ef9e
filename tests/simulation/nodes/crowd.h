// SPDX-License-Identifier: Apache-2.0
// Crowd: the directories of many nodes on one simulated etcd, with nothing else around them, and what they cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/simulation/nodes/directory_process.h"

namespace ashlar::simulation::nodes {

struct CrowdOptions {
  size_t nodes = 100;
  uint64_t objects = 200;  // that each node announces
  size_t models = 1;       // each node serves one of them, and follows it alone
  daemon::EtcdDirectoryOptions directory;
};

// Seconds of simulated time; bytes and events are those of messages as they were sent.
struct CrowdReport {
  std::string failure;       // empty: all knew all in the end
  double members_known = 0;  // from the start of all until each knows all members
  double announced = 0;      // until every mirror has every entry
  double keys_a_node_second = 0, budget_a_node_second = 0;
  uint64_t transactions = 0;
  double events_a_node_second = 0, bytes_a_node_second = 0, bytes_an_event = 0;
  double keep_alives_second = 0;
  uint64_t entries_a_mirror = 0, bytes_a_mirror = 0;  // the largest one
  double dead_erased = 0;                             // a tenth of the nodes is killed: until no other believes them
  double swept = 0;                                   // until etcd has no keys of theirs
  double emptied_members = 0;                         // etcd loses everything: until each knows all members again
  double emptied_announced = 0;                       // until every mirror is whole again, and etcd has every key
};

CrowdReport RunCrowd(const CrowdOptions& options, uint64_t seed);
std::string ToJson(const CrowdOptions& options, const CrowdReport& report);

}  // namespace ashlar::simulation::nodes
