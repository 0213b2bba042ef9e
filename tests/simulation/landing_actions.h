// SPDX-License-Identifier: Apache-2.0
// The driver's steps on landings of segments, prefixes and shared pages: they start, end, and are cancelled, as are
// compositions.
#pragma once

#include <vector>

#include "storage/transfer/transfer.h"
#include "tests/simulation/clients.h"
#include "tests/simulation/context.h"
#include "tests/simulation/oracle.h"

namespace ashlar::simulation {

class LandingActions : DriverPart {
 public:
  LandingActions(Context& context, Clients& clients, Oracle& oracle)
      : DriverPart(context), clients_(clients), oracle_(oracle) {}

  void Start(Landing landing, storage::LandTarget target);
  void Quiesce();

 private:
  void Landed(LandingId number, const std::vector<MissReason>& verdict);

  Clients& clients_;
  Oracle& oracle_;
};

}  // namespace ashlar::simulation
