// SPDX-License-Identifier: Apache-2.0
// The engines, operators and faults of one simulation of several nodes, and the oracle that watches them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tests/simulation/nodes/cluster.h"
#include "tests/simulation/nodes/engines.h"
#include "tests/simulation/nodes/faults.h"
#include "tests/simulation/nodes/nodes.h"
#include "tests/simulation/nodes/oracle.h"

namespace ashlar::simulation::nodes {

class Driver : Cluster, DriverPart {
 public:
  // `nodes`: 0: drawn.
  Driver(uint64_t seed, Bug bug, size_t nodes = 0);
  ~Driver();
  Report Run();

 private:
  Engines engines_{*this};
  Faults faults_{*this, engines_};
  Oracle oracle_{*this, engines_, faults_};
};

}  // namespace ashlar::simulation::nodes
