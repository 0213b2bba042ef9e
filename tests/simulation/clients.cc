// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/clients.h"

#include <algorithm>

namespace ashlar::simulation {

void Clients::Use(const LeaseId& id, bool composed) {
  for (Lease& lease : leases) {
    if (lease.id != id) continue;
    lease.deadline.reset();
    lease.composed |= composed;
  }
}

uint64_t Clients::InFlight(TenantId tenant) const {
  const auto of_tenant = [tenant](const auto& item) { return TenantOf(item.second.session) == tenant; };
  return static_cast<uint64_t>(std::ranges::count_if(landings, of_tenant) +
                               std::ranges::count_if(compositions, of_tenant));
}

bool Clients::SomethingEnds() const {
  return ticks || !searches.empty() || !releasing.empty() || !closing.empty();
}

void Clients::DropSlices() {
  searches.clear();
  releasing.clear();
  closing.clear();
  ticks = ticked_in_parts = false;
}

void Clients::DropAll() {
  leases.clear();
  reservations.clear();
  landings.clear();
  compositions.clear();
  commits.clear();
  sessions.clear();
  draining = 0;
}

}  // namespace ashlar::simulation
