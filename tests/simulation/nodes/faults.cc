// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/faults.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ashlar::simulation::nodes {

void Faults::Start(size_t machine) {
  Machine& at = machines_[machine];
  Say(absl::StrCat("node ", machine, " starts"));
  if (at.incarnation != 0) Reach(Event::kStartedAgain);
  const uint64_t same = bug_ == Bug::kComesBackAsItself ? at.incarnation : 0;
  at.node =
      std::make_unique<Node>(cluster_.around, machine, at.clock, *cluster_.memories[machine], habits_.extents, same);
  at.incarnation = at.node->incarnation();
  at.stops = false;
  cluster_.disturbed_at = schedule_.now();
  engines_.Started(*at.node);
}

void Faults::End(size_t machine, bool leaves) {
  Machine& at = machines_[machine];
  Say(absl::StrCat("node ", machine, leaves ? " leaves" : " is killed"));
  cluster_.disturbed_at = schedule_.now();
  Harvest(*at.node);
  engines_.Ended(machine);
  at.node->life()->leaves = leaves;
  at.node.reset();
}

void Faults::Harvest(Node& node) {
  const daemon::PeersStats peers = node.peers.stats();
  const daemon::DirectoryStats directory = node.directory->Stats();
  const daemon::RouterFigures router = node.router->figures();
  const auto taken = [](const daemon::Offerer::Stats& stats) {
    const auto found = stats.outcomes.find(TakeOutcome::kAccepted);
    return found == stats.outcomes.end() ? 0 : found->second;
  };
  Reach(Event::kResynced, directory.resyncs > kTenants ? directory.resyncs - kTenants : 0);
  Reach(Event::kSwept, directory.swept);
  Reach(Event::kLateLookup, peers.lookup.late);
  Reach(Event::kJoinedLookup, peers.lookup.joined);
  Reach(Event::kMoved, peers.objects.moved);
  Reach(Event::kHedged, peers.objects.hedged);
  Reach(Event::kHedgeWon, peers.objects.hedges_won);
  Reach(Event::kDrainTransferred, taken(peers.drained));
  Reach(Event::kReplicated, taken(peers.replicated));
  Reach(Event::kPeerLeaseExpired, peers.holder.expired);
  Reach(Event::kPrefilledHere, router.here_segments);
  Reach(Event::kPrefilledElsewhere, router.arrived > router.here_segments ? router.arrived - router.here_segments : 0);
  Reach(Event::kPrefillGivenBack, router.given_back);
}

void Faults::NextFault() {
  if (!cluster_.has_faults) return;
  schedule_.After(schedule_.DrawTime(habits_.fault_every), [this] { NextFault(); });
  const uint64_t choice = Draw(10);
  schedule_.Trace(choice);
  if (choice < 4) return HarmNode();
  if (choice < 7) return HarmNetwork();
  HarmEtcd();
}

void Faults::HarmNode() {
  const size_t machine = Draw(habits_.nodes);
  Machine& at = machines_[machine];
  if (at.node == nullptr) {
    if (!at.for_good) Start(machine);
    return;
  }
  switch (Draw(4)) {
    case 0:
      Reach(Event::kKilled);
      End(machine, /*leaves=*/false);
      at.for_good = Running().size() > 2 && schedule_.Chance(20);
      break;
    case 1:
      if (habits_.drains && !at.stops) StopWell(machine);
      break;
    case 2: {
      if (at.node->life()->frozen_until > schedule_.now()) return;
      Reach(Event::kStoodStill);
      const Nanos still = schedule_.DrawTime(3 * habits_.lease_seconds * kSecond);
      Say(absl::StrCat("node ", machine, " stands still for ", still / kMillisecond, " ms"));
      at.node->life()->frozen_until = schedule_.now() + still;
      engines_.StandStill(machine, still);
      break;
    }
    default:
      if (schedule_.Chance(50)) return;
      Reach(Event::kKilled);  // and restarted at once
      End(machine, /*leaves=*/false);
      Start(machine);
  }
}

// Some are ended before they are ready, as by drain_seconds.
void Faults::StopWell(size_t machine) {
  machines_[machine].stops = true;
  const Nanos now = schedule_.now();
  const Nanos until = schedule_.Chance(50) ? now + 5 * kSecond : INT64_MAX;
  Say(absl::StrCat("node ", machine, " drains"));
  At(machine)->Drain();
  AwaitDrained(machine, now, until);
}

bool Faults::Disturbed() const {
  const bool still = std::ranges::any_of(machines_, [this](const Machine& at) {
    return at.node != nullptr && at.node->life()->frozen_until > schedule_.now();
  });
  return still || !network_.calm() || fabric_.flips_percent > 0 || !etcd_.up() || etcd_.slow > 0;
}

void Faults::AwaitDrained(size_t machine, Nanos began, Nanos until) {
  // A call hit by a fault ends by a connection's timeout or the offer's patience; the objects then go to other nodes.
  constexpr Nanos kWithin = Calls::kTimeout + 10 * kSecond + Calls::kCallTimeout + 5 * kSecond;
  schedule_.For(At(machine)->life(), 100 * kMillisecond, [this, machine, began, until] {
    const bool drained = At(machine)->drained();
    if (!drained && schedule_.now() - std::max(began, cluster_.disturbed_at) > kWithin) {
      return Fail(absl::StrCat("node ", machine, " drains without end, and nothing is in its way"));
    }
    if (!drained && schedule_.now() < until) return AwaitDrained(machine, began, until);
    Reach(Event::kStoppedWell, drained ? 1 : 0);
    // Not from within one of its own events.
    schedule_.After(0, [this, machine, incarnation = machines_[machine].incarnation] {
      if (At(machine) == nullptr || machines_[machine].incarnation != incarnation) return;
      End(machine, /*leaves=*/true);
      schedule_.After(schedule_.DrawTime(5 * kSecond), [this, machine] {
        if (At(machine) == nullptr) Start(machine);
      });
    });
  });
}

void Faults::HarmNetwork() {
  const size_t a = Draw(habits_.nodes);
  size_t b = Draw(habits_.nodes + 1);  // the last one is etcd's machine
  if (a == b) b = habits_.nodes;
  Network::Link& there = network_.link(a, b);
  const uint64_t choice = Draw(7);
  Say(absl::StrCat("network: ", choice, " between ", a, " and ", b));
  switch (choice) {
    case 0:
      Reach(Event::kCut);
      network_.Cut(a, b);
      network_.Cut(b, a);
      break;
    case 1:
      Reach(Event::kCutOneWay);
      schedule_.Chance(50) ? network_.Cut(a, b) : network_.Cut(b, a);
      break;
    case 2:
      Reach(Event::kSlowed);
      there.delay = schedule_.DrawTime(300 * kMillisecond);
      there.jitter = schedule_.DrawTime(300 * kMillisecond);
      break;
    case 3:
      Reach(Event::kLostMessages);
      there.lost_percent = 1 + Draw(30);
      break;
    case 4:
      if (habits_.flips) fabric_.flips_percent = fabric_.flips_percent > 0 ? 0 : 1 + Draw(30);
      break;
    case 5:
      network_.Heal(a, b);
      network_.Heal(b, a);
      break;
    default:
      network_.HealAll();
  }
}

void Faults::HarmEtcd() {
  const uint64_t choice = Draw(6);
  Say(absl::StrCat("etcd: ", choice));
  switch (choice) {
    case 0:
      if (!etcd_.up()) return etcd_.Start();
      Reach(Event::kEtcdDown);
      etcd_.Stop();
      break;
    case 1:
      if (etcd_.up()) etcd_.Stop();
      etcd_.Start();  // restarts immediately
      break;
    case 2:
      if (schedule_.Chance(50)) return;
      Reach(Event::kEtcdEmptied);
      if (etcd_.up()) etcd_.Stop();
      etcd_.Erase();
      etcd_.Start();
      break;
    case 3:
      if (!etcd_.up()) return;
      Reach(Event::kEtcdCompacted);
      etcd_.Compact();
      break;
    case 4:
      Reach(Event::kEtcdSlow);
      etcd_.slow = schedule_.DrawTime(2 * kSecond);
      break;
    default:
      etcd_.slow = 0;
      if (!etcd_.up()) etcd_.Start();
  }
}

void Faults::Heal() {
  Say("healed");
  cluster_.has_faults = false;
  network_.HealAll();
  fabric_.flips_percent = 0;
  etcd_.slow = 0;
  if (!etcd_.up()) etcd_.Start();
  const auto drains = [](const Machine& at) { return at.node != nullptr && at.stops; };
  while (report_.failure.empty() && std::ranges::any_of(machines_, drains)) RunUntil(schedule_.now() + kSecond);
  calls_.busy_percent = 0;
  Nanos stands_still_until = schedule_.now();
  for (size_t machine = 0; machine < habits_.nodes; ++machine) {
    if (At(machine) == nullptr && !machines_[machine].for_good) Start(machine);
    if (At(machine) == nullptr) continue;
    stands_still_until = std::max(stands_still_until, At(machine)->life()->frozen_until);
  }
  RunUntil(stands_still_until);
  Say("all run");
}

}  // namespace ashlar::simulation::nodes
