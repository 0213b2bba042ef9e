// SPDX-License-Identifier: Apache-2.0
// Cluster: the machines of one simulation with everything around them, which the driver's parts share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/simulation/nodes/node.h"
#include "tests/simulation/nodes/nodes.h"

namespace ashlar::simulation::nodes {

struct Machine {
  MachineClock clock;
  std::unique_ptr<Node> node;  // null: no daemon runs there
  uint64_t incarnation = 0;    // incarnation of the last one
  bool for_good = false;       // it is not started again
  bool stops = false;          // true: it drains first
};
// The drawn sizes and habits of one seed.
struct Habits {
  size_t nodes = 0;
  uint32_t lease_seconds = 5;
  uint64_t extents = 16;  // a tenant has these on each node
  Nanos faults_for = 30 * kSecond, op_every = kSecond, fault_every = kSecond;
  bool prefills = false, flips = false, drains = false, reorders = false, announces_all = true;
  bool withholds = false, refuses = false;
};

struct Cluster {
  // `nodes`: 0: drawn.
  Cluster(uint64_t seed, Bug bug, size_t nodes);

  const Bug bug;
  const Habits habits;
  Schedule schedule;
  Network network;
  Etcd etcd;
  Fabric fabric;
  CallSwitch calls;
  Surroundings around;
  std::vector<storage::MemoryTier*> memories;  // by machine
  std::vector<Machine> machines;
  Report report;
  bool has_faults = true, has_engines = true;
  Nanos disturbed_at = 0;  // when a fault was seen last
};

// Base of the driver's parts: gives them short names for the cluster.
class DriverPart {
 protected:
  explicit DriverPart(Cluster& cluster);

  void Fail(const std::string& what);
  // Prints it with the time to stderr if ASHLAR_NODES_ALOUD is set.
  void Say(const std::string& what) const;
  void Reach(Event event, uint64_t times = 1) { report_.reached.counts[static_cast<size_t>(event)] += times; }
  uint64_t Draw(uint64_t below) { return schedule_.Draw(below); }
  Node* At(size_t machine) { return machines_[machine].node.get(); }
  std::vector<size_t> Running() const;
  std::optional<size_t> AnyRunning();
  Text AnyText(TenantId tenant) { return {tenant, 1 + Draw(kTexts)}; }
  void RunUntil(Nanos end);

  Cluster& cluster_;
  const Bug bug_;
  const Habits& habits_;
  Schedule& schedule_;
  Network& network_;
  Etcd& etcd_;
  Fabric& fabric_;
  CallSwitch& calls_;
  std::vector<Machine>& machines_;
  Report& report_;
};

}  // namespace ashlar::simulation::nodes
