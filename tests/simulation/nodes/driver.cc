// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/driver.h"

namespace ashlar::simulation::nodes {
namespace {

constexpr Nanos kSlack = 2 * kSecond;
// Leases that peers did not close live for a minute.
constexpr Nanos kQuiet = 75 * kSecond;

}  // namespace

Driver::Driver(uint64_t seed, Bug its_bug, size_t its_nodes)
    : Cluster(seed, its_bug, its_nodes), DriverPart(static_cast<Cluster&>(*this)) {}

Driver::~Driver() {
  for (size_t machine = 0; machine < machines_.size(); ++machine) {
    if (At(machine) != nullptr) faults_.End(machine, /*leaves=*/false);
  }
}

Report Driver::Run() {
  for (size_t machine = 0; machine < habits_.nodes; ++machine) {
    schedule_.After(schedule_.DrawTime(3 * kSecond), [this, machine] {
      if (At(machine) == nullptr) faults_.Start(machine);
    });
  }
  schedule_.After(kSecond, [this] { engines_.NextOperation(); });
  schedule_.After(4 * kSecond, [this] { faults_.NextFault(); });
  if (bug_ == Bug::kStopsClocks) {
    schedule_.After(6 * kSecond, [this] { machines_[Draw(habits_.nodes)].clock.Stop(); });
  }
  oracle_.Watch();
  RunUntil(schedule_.now() + habits_.faults_for);
  faults_.Heal();
  has_engines = false;
  const Nanos healed = schedule_.now();
  const Nanos lease = habits_.lease_seconds * kSecond;
  RunUntil(healed + 2 * lease + kSlack);
  if (report_.failure.empty()) oracle_.CheckConverged();
  RunUntil(healed + 4 * lease);
  if (report_.failure.empty()) oracle_.CheckKeys();
  RunUntil(healed + kQuiet);
  // Plans of engines may take longer, and have their own limits.
  while (report_.failure.empty() && !engines_.plans().empty()) RunUntil(schedule_.now() + kSecond);
  RunUntil(schedule_.now() + 5 * kSecond);
  if (report_.failure.empty()) oracle_.CheckNothingIsLeft();
  if (report_.failure.empty()) oracle_.CheckEverythingLands();
  RunUntil(schedule_.now() + 5 * kSecond);
  if (report_.failure.empty()) oracle_.CheckNothingIsLeft();
  for (const size_t machine : Running()) faults_.Harvest(*At(machine));
  Reach(Event::kLeaseExpired, etcd_.counts().expired);
  Reach(Event::kFlippedBits, fabric_.flipped);
  Reach(Event::kCallNotShared, calls_.refused_tenant);
  Reach(Event::kCallRefusedBusy, calls_.refused_busy);
  report_.trace = schedule_.trace() ^ schedule_.events();
  report_.events = schedule_.events();
  return report_;
}

}  // namespace ashlar::simulation::nodes
