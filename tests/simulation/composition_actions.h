// SPDX-License-Identifier: Apache-2.0
// The driver's steps on running states: segments' interiors are composed onto them.
#pragma once

#include "tests/simulation/clients.h"
#include "tests/simulation/context.h"
#include "tests/simulation/oracle.h"

namespace ashlar::simulation {

class CompositionActions : DriverPart {
 public:
  CompositionActions(Context& context, Clients& clients, Oracle& oracle)
      : DriverPart(context), clients_(clients), oracle_(oracle) {}

  void Compose();

 private:
  void Composed(LandingId number, const storage::CompositionVerdict& verdict);

  Clients& clients_;
  Oracle& oracle_;
};

}  // namespace ashlar::simulation
