// SPDX-License-Identifier: Apache-2.0
// The clients, operators and faults of one simulation, drawn step by step, and the oracle that watches them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tests/simulation/clients.h"
#include "tests/simulation/composition_actions.h"
#include "tests/simulation/context.h"
#include "tests/simulation/fault_coverage.h"
#include "tests/simulation/history.h"
#include "tests/simulation/landing_actions.h"
#include "tests/simulation/oracle.h"
#include "tests/simulation/page_actions.h"
#include "tests/simulation/prompt_actions.h"
#include "tests/simulation/segment_actions.h"
#include "tests/simulation/simulation.h"
#include "tests/simulation/slice_actions.h"
#include "tests/simulation/upkeep_actions.h"
#include "tests/simulation/work_actions.h"

namespace ashlar::simulation {

// Draws the steps, and does those that concern several parts.
class Driver : Context, DriverPart {
 public:
  Driver(uint64_t seed, Bug bug);
  Report Run(int operations);

 private:
  struct Operation {
    uint64_t weight;
    std::function<void()> act;
  };

  static Sizes DrawSizes(uint64_t seed);
  void AddOperations();
  void Step();
  void Open();
  void Land();
  void Die();
  void Advance();
  void Crash();
  void Conclude();
  void CheckWrittenAgain();
  void CheckMemoryIsFree();

  Clients clients_;
  History history_;
  Oracle oracle_{*this, clients_, history_};
  LandingActions landings_{*this, clients_, oracle_};
  SegmentActions segments_{*this, clients_, history_, oracle_, landings_};
  PromptActions prompts_{*this, clients_, history_, oracle_, landings_};
  CompositionActions compositions_{*this, clients_, oracle_};
  PageActions pages_{*this, clients_, oracle_, landings_};
  SliceActions slices_{*this, clients_, history_, oracle_, prompts_};
  FaultCoverage coverage_{*this, clients_, history_, oracle_, pages_};
  WorkActions work_{*this, clients_, history_, oracle_, slices_, coverage_};
  UpkeepActions upkeep_{*this, history_, oracle_, work_};
  std::vector<Operation> operations_;
  uint64_t weight_ = 0;  // total weight
};

}  // namespace ashlar::simulation
