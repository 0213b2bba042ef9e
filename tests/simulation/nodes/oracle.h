// SPDX-License-Identifier: Apache-2.0
// Oracle: checks invariants during faults, and the required state after them.
#pragma once

#include <cstddef>

#include "tests/simulation/nodes/cluster.h"
#include "tests/simulation/nodes/engines.h"
#include "tests/simulation/nodes/faults.h"

namespace ashlar::simulation::nodes {

class Oracle : DriverPart {
 public:
  Oracle(Cluster& cluster, Engines& engines, const Faults& faults)
      : DriverPart(cluster), engines_(engines), faults_(faults) {}

  void Watch();
  void CheckConverged();
  void CheckKeys();
  void CheckEverythingLands();
  void CheckNothingIsLeft();

 private:
  void CheckMirrors();
  void SayWhoHas(const Text& text, size_t asked);

  Engines& engines_;
  const Faults& faults_;
};

}  // namespace ashlar::simulation::nodes
