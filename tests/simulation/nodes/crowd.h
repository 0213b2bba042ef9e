// SPDX-License-Identifier: Apache-2.0
// Crowd: the directories of many nodes on one simulated etcd, without the rest of a node, and their costs.
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
  uint64_t objects = 200;  // objects that each node announces
  size_t models = 1;       // each node serves one of them, and follows only that one
  daemon::EtcdDirectoryOptions directory;
};

// Seconds of simulated time; bytes and events of messages as sent.
struct CrowdReport {
  std::string failure;       // empty: all knew all in the end
  double members_known = 0;  // from the start of all nodes until each knows all members
  double announced = 0;      // until every mirror has every entry
  double keys_a_node_second = 0, budget_a_node_second = 0;
  uint64_t transactions = 0;
  double events_a_node_second = 0, bytes_a_node_second = 0, bytes_an_event = 0;
  double keep_alives_second = 0;
  uint64_t entries_a_mirror = 0, bytes_a_mirror = 0;  // the largest one
  double dead_erased = 0;        // a tenth of the nodes is killed: until no other node counts them as present
  double swept = 0;              // until etcd has none of their keys
  double emptied_members = 0;    // after etcd loses everything: until each knows all members again
  double emptied_announced = 0;  // until every mirror is complete again, and etcd has every key
};

CrowdReport RunCrowd(const CrowdOptions& options, uint64_t seed);
std::string ToJson(const CrowdOptions& options, const CrowdReport& report);

}  // namespace ashlar::simulation::nodes
