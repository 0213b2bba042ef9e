// SPDX-License-Identifier: Apache-2.0
// The faults of all nodes, of the network and of etcd, and the starts and ends of nodes.
#pragma once

#include <cstddef>

#include "tests/simulation/nodes/cluster.h"
#include "tests/simulation/nodes/engines.h"

namespace ashlar::simulation::nodes {

class Faults : DriverPart {
 public:
  Faults(Cluster& cluster, Engines& engines) : DriverPart(cluster), engines_(engines) {}

  void Start(size_t machine);
  void End(size_t machine, bool leaves);
  // Draws a fault at drawn times, until Heal.
  void NextFault();
  bool Disturbed() const;
  void Heal();
  // Counts what a node's parts have reached.
  void Harvest(Node& node);

 private:
  void HarmNode();
  void HarmNetwork();
  void HarmEtcd();
  void StopWell(size_t machine);
  void AwaitDrained(size_t machine, Nanos began, Nanos until);

  Engines& engines_;
};

}  // namespace ashlar::simulation::nodes
