// SPDX-License-Identifier: Apache-2.0
// The driver's steps on the executors: their work ends, the disk fails, and the disk hangs.
#pragma once

#include "tests/simulation/clients.h"
#include "tests/simulation/context.h"
#include "tests/simulation/fault_coverage.h"
#include "tests/simulation/history.h"
#include "tests/simulation/oracle.h"
#include "tests/simulation/slice_actions.h"

namespace ashlar::simulation {

class WorkActions : DriverPart {
 public:
  WorkActions(Context& context, Clients& clients, History& history, Oracle& oracle, SliceActions& slices,
              FaultCoverage& coverage)
      : DriverPart(context),
        clients_(clients),
        history_(history),
        oracle_(oracle),
        slices_(slices),
        coverage_(coverage) {}

  void Execute();
  void SetFaults();
  void HangDisk();
  void RunAll();
  void Heal();  // ends all faults

 private:
  void OutlastHang();

  Clients& clients_;
  History& history_;
  Oracle& oracle_;
  SliceActions& slices_;
  FaultCoverage& coverage_;
};

}  // namespace ashlar::simulation
