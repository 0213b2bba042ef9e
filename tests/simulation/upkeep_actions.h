// SPDX-License-Identifier: Apache-2.0
// The driver's steps of operators: on one segment, erasing a tenant, and verifying all copies.
#pragma once

#include <cstdint>
#include <memory>

#include "tests/simulation/context.h"
#include "tests/simulation/history.h"
#include "tests/simulation/oracle.h"
#include "tests/simulation/work_actions.h"

namespace ashlar::simulation {

class UpkeepActions : DriverPart {
 public:
  UpkeepActions(Context& context, History& history, Oracle& oracle, WorkActions& work)
      : DriverPart(context), history_(history), oracle_(oracle), work_(work) {}

  void Operate();
  void Erase();
  void Verify();
  void Conclude();
  void Crashed();

 private:
  void GoOnErasure();
  uint64_t Damaged();
  void CheckDamage();

  History& history_;
  Oracle& oracle_;
  WorkActions& work_;
  std::shared_ptr<storage::Erasure> erasure_;  // null: none
  TenantId erases_ = 0;                        // the erased tenant
  bool erased_is_gone_ = false;
};

}  // namespace ashlar::simulation
