// SPDX-License-Identifier: Apache-2.0
// The driver's steps on segments: they are reserved, published, attached to and landed.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/simulation/clients.h"
#include "tests/simulation/context.h"
#include "tests/simulation/history.h"
#include "tests/simulation/landing_actions.h"
#include "tests/simulation/oracle.h"

namespace ashlar::simulation {

class SegmentActions : DriverPart {
 public:
  SegmentActions(Context& context, Clients& clients, History& history, Oracle& oracle, LandingActions& landings)
      : DriverPart(context), clients_(clients), history_(history), oracle_(oracle), landings_(landings) {}

  void Reserve();
  void Publish();
  void Abandon();
  void Attach();
  void Land(Lease& lease);  // the lease lists at least one text

 private:
  void Published(SessionId session, storage::ReservationId id, PublishOutcome outcome);
  void Landed(const Landing& landing, MissReason reason);

  Clients& clients_;
  History& history_;
  Oracle& oracle_;
  LandingActions& landings_;
  uint64_t publishes_ = 0;
};

}  // namespace ashlar::simulation
