// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/driver.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace ashlar::simulation::nodes {
namespace {

constexpr uint64_t kMostExtents = 24;  // of a tenant on a node
constexpr Nanos kSlack = 2 * kSecond;
// Leases that peers did not close live for a minute.
constexpr Nanos kQuiet = 75 * kSecond;

// Memory of nodes, by machine, reused by successive simulations of this thread.
storage::MemoryTier& MemoryOf(size_t machine) {
  thread_local std::vector<std::unique_ptr<storage::MemoryTier>> all;
  while (all.size() <= machine) {
    all.push_back(storage::TestTier({{1, 2 * kMostExtents}, {2, 2 * kMostExtents}}));
  }
  return *all[machine];
}

}  // namespace

Driver::Habits Driver::DrawHabits(uint64_t seed, size_t nodes) {
  std::mt19937_64 random(seed ^ 0x5EED);
  const auto draw = [&](uint64_t below) { return random() % below; };
  Habits habits;
  habits.nodes = nodes > 0 ? nodes : 2 + draw(draw(3) == 0 ? 7 : 4);
  habits.lease_seconds = static_cast<uint32_t>(3 + draw(5));
  habits.extents = 10 + draw(kMostExtents - 10);
  habits.faults_for = static_cast<Nanos>(20 + draw(40)) * kSecond;
  habits.op_every = static_cast<Nanos>(50 + draw(400)) * kMillisecond;
  habits.fault_every = static_cast<Nanos>(1 + draw(8)) * kSecond;
  habits.prefills = draw(3) == 0;
  habits.flips = draw(4) == 0;
  habits.drains = draw(2) == 0;
  habits.reorders = draw(2) == 0;
  habits.announces_all = draw(4) > 0;
  habits.withholds = draw(3) == 0;
  habits.refuses = draw(3) == 0;
  return habits;
}

Driver::Driver(uint64_t seed, Bug bug, size_t nodes)
    : bug_(bug),
      habits_(DrawHabits(seed, nodes)),
      schedule_(seed),
      network_(schedule_, habits_.nodes + 1),
      etcd_(schedule_, bug),
      fabric_(network_, bug),
      calls_(network_, bug),
      around_{
          .schedule = schedule_, .network = network_, .etcd = etcd_, .fabric = fabric_, .calls = calls_, .bug = bug} {
  around_.lease_seconds = habits_.lease_seconds;
  around_.order = habits_.reorders ? Wire::Order::kAny : Wire::Order::kKept;
  around_.announce = habits_.announces_all ? daemon::AnnounceMode::kAll : daemon::AnnounceMode::kUsedTwice;
  calls_.busy_percent = habits_.refuses ? 1 + Draw(10) : 0;
  if (habits_.withholds) {
    const size_t of = Draw(habits_.nodes);
    const size_t with = (of + 1 + Draw(habits_.nodes - 1)) % habits_.nodes;
    calls_.not_shared = {.of = of, .with = with, .tenant = Node::Tenants()[1 + Draw(kTenants)]};
  }
  for (size_t machine = 0; machine < habits_.nodes; ++machine) {
    const double rate = 0.99 + 0.02 * static_cast<double>(Draw(1000)) / 1000;
    const auto years = static_cast<Nanos>(Draw(5)) * 365 * 86400 * kSecond;
    machines_.push_back({.clock = MachineClock(schedule_, years + schedule_.DrawTime(kSecond), rate)});
    memories_.push_back(&MemoryOf(machine));
  }
}

Driver::~Driver() {
  for (size_t machine = 0; machine < machines_.size(); ++machine) {
    if (At(machine) != nullptr) End(machine, /*leaves=*/false);
  }
}

void Driver::Fail(const std::string& what) {
  if (!report_.failure.empty()) return;
  report_.failure = what;
  report_.at_seconds = static_cast<double>(schedule_.now()) / 1e9;
}

void Driver::Say(const std::string& what) const {
  static const bool aloud = std::getenv("ASHLAR_NODES_ALOUD") != nullptr;
  if (aloud) std::fprintf(stderr, "%10.3f %s\n", static_cast<double>(schedule_.now()) / 1e9, what.c_str());
}

std::vector<size_t> Driver::Running() const {
  std::vector<size_t> running;
  for (size_t machine = 0; machine < machines_.size(); ++machine) {
    if (machines_[machine].node != nullptr) running.push_back(machine);
  }
  return running;
}

// Not one that is frozen or stopping.
std::optional<size_t> Driver::AnyRunning() {
  std::vector<size_t> running = Running();
  std::erase_if(running, [this](size_t machine) {
    return At(machine)->life()->frozen_until > schedule_.now() || (machines_[machine].stops && schedule_.Chance(80));
  });
  if (running.empty()) return std::nullopt;
  return running[Draw(running.size())];
}

void Driver::RunUntil(Nanos end) {
  while (report_.failure.empty() && schedule_.RunNext(end)) {
  }
}

Report Driver::Run() {
  for (size_t machine = 0; machine < habits_.nodes; ++machine) {
    schedule_.After(schedule_.DrawTime(3 * kSecond), [this, machine] {
      if (At(machine) == nullptr) Start(machine);
    });
  }
  schedule_.After(kSecond, [this] { NextOperation(); });
  schedule_.After(4 * kSecond, [this] { NextFault(); });
  if (bug_ == Bug::kStopsClocks) {
    schedule_.After(6 * kSecond, [this] { machines_[Draw(habits_.nodes)].clock.Stop(); });
  }
  Watch();
  RunUntil(schedule_.now() + habits_.faults_for);
  Heal();
  engines_ = false;
  const Nanos healed = schedule_.now();
  const Nanos lease = habits_.lease_seconds * kSecond;
  RunUntil(healed + 2 * lease + kSlack);
  if (report_.failure.empty()) CheckConverged();
  RunUntil(healed + 4 * lease);
  if (report_.failure.empty()) CheckKeys();
  RunUntil(healed + kQuiet);
  // Plans of engines may take longer, and have their own limits.
  while (report_.failure.empty() && !plans_.empty()) RunUntil(schedule_.now() + kSecond);
  RunUntil(schedule_.now() + 5 * kSecond);
  if (report_.failure.empty()) CheckNothingIsLeft();
  if (report_.failure.empty()) CheckEverythingLands();
  RunUntil(schedule_.now() + 5 * kSecond);
  if (report_.failure.empty()) CheckNothingIsLeft();
  for (const size_t machine : Running()) Harvest(*At(machine));
  Reach(Event::kLeaseExpired, etcd_.counts().expired);
  Reach(Event::kFlippedBits, fabric_.flipped);
  Reach(Event::kCallNotShared, calls_.refused_tenant);
  Reach(Event::kCallRefusedBusy, calls_.refused_busy);
  report_.trace = schedule_.trace() ^ schedule_.events();
  report_.events = schedule_.events();
  return report_;
}

}  // namespace ashlar::simulation::nodes
