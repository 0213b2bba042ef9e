// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/landing_actions.h"

#include <algorithm>
#include <utility>

namespace ashlar::simulation {

void LandingActions::Start(Landing landing, storage::LandTarget target) {
  const LandingId number = clients_.next_landing++;
  const SessionId session = landing.session;
  const LeaseId lease = landing.lease;
  clients_.landings.emplace(number, std::move(landing));
  cache().Land(session, number, lease, std::move(target),
               {.progress = [](uint32_t) {},
                .done = [this, number](const std::vector<MissReason>& verdict) { Landed(number, verdict); }});
}

void LandingActions::Landed(LandingId number, const std::vector<MissReason>& verdict) {
  const auto found = clients_.landings.find(number);
  if (found == clients_.landings.end()) return Fail("a landing was answered twice");
  const Landing landing = std::move(found->second);
  clients_.landings.erase(found);
  Trace(static_cast<uint64_t>(verdict[0]));
  for (const MissReason reason : verdict) {
    if (reason == MissReason::kCancelled && !landing.cancelled) Fail("a landing ended as cancelled without Cancel");
    if (reason == MissReason::kBusy && oracle_.MayBegin(TenantOf(landing.session))) {
      Fail("a landing was refused, and there was space for it");
    }
  }
  landing.ended(landing, verdict);
}

void LandingActions::Quiesce() {
  if (clients_.landings.empty() && clients_.compositions.empty()) return;
  const bool composing = clients_.landings.empty() || (!clients_.compositions.empty() && Draw(3) == 0);
  LandingId number = 0;
  SessionId session = 0;
  if (composing) {
    const auto composition = Any(clients_.compositions);
    composition->second.cancelled = true;
    number = composition->first;
    session = composition->second.session;
  } else {
    const auto landing = Any(clients_.landings);
    landing->second.cancelled = true;
    number = landing->first;
    session = landing->second.session;
  }
  cache().Quiesce(session, number, [this, number] {
    if (clients_.landings.contains(number) || clients_.compositions.contains(number))
      Fail("a landing is quiet before its verdict");
  });
}

}  // namespace ashlar::simulation
