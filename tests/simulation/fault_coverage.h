// SPDX-License-Identifier: Apache-2.0
// FaultCoverage: notes which faults struck, and what was in progress then.
#pragma once

#include <cstdint>

#include "storage/testing/simulated_disk.h"
#include "tests/simulation/clients.h"
#include "tests/simulation/context.h"
#include "tests/simulation/history.h"
#include "tests/simulation/oracle.h"
#include "tests/simulation/page_actions.h"

namespace ashlar::simulation {

class FaultCoverage : DriverPart {
 public:
  FaultCoverage(Context& context, const Clients& clients, const History& history, Oracle& oracle,
                const PageActions& pages)
      : DriverPart(context), clients_(clients), history_(history), oracle_(oracle), pages_(pages) {}

  void Note(Fault fault);
  void NoteNew();  // notes the faults of the disk and the executors since the last call

 private:
  const Clients& clients_;
  const History& history_;
  Oracle& oracle_;
  const PageActions& pages_;
  storage::SimulatedDisk::Counts seen_;
  uint64_t seen_refused_ = 0;
};

}  // namespace ashlar::simulation
