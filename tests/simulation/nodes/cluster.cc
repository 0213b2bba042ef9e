// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/cluster.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

namespace ashlar::simulation::nodes {
namespace {

constexpr uint64_t kMostExtents = 24;  // limit per tenant and node

// Memory of nodes, by machine, reused by successive simulations of this thread.
storage::MemoryTier& MemoryOf(size_t machine) {
  thread_local std::vector<std::unique_ptr<storage::MemoryTier>> all;
  while (all.size() <= machine) {
    all.push_back(storage::TestTier({{1, 2 * kMostExtents}, {2, 2 * kMostExtents}}));
  }
  return *all[machine];
}

Habits DrawHabits(uint64_t seed, size_t nodes) {
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

}  // namespace

Cluster::Cluster(uint64_t seed, Bug its_bug, size_t nodes)
    : bug(its_bug),
      habits(DrawHabits(seed, nodes)),
      schedule(seed),
      network(schedule, habits.nodes + 1),
      etcd(schedule, its_bug),
      fabric(network, its_bug),
      calls(network, its_bug),
      around{.schedule = schedule, .network = network, .etcd = etcd, .fabric = fabric, .calls = calls, .bug = its_bug} {
  around.lease_seconds = habits.lease_seconds;
  around.order = habits.reorders ? Wire::Order::kAny : Wire::Order::kKept;
  around.announce = habits.announces_all ? daemon::AnnounceMode::kAll : daemon::AnnounceMode::kUsedTwice;
  calls.busy_percent = habits.refuses ? 1 + schedule.Draw(10) : 0;
  if (habits.withholds) {
    const size_t of = schedule.Draw(habits.nodes);
    const size_t with = (of + 1 + schedule.Draw(habits.nodes - 1)) % habits.nodes;
    calls.not_shared = {.of = of, .with = with, .tenant = Node::Tenants()[1 + schedule.Draw(kTenants)]};
  }
  for (size_t machine = 0; machine < habits.nodes; ++machine) {
    const double rate = 0.99 + 0.02 * static_cast<double>(schedule.Draw(1000)) / 1000;
    const auto years = static_cast<Nanos>(schedule.Draw(5)) * 365 * 86400 * kSecond;
    machines.push_back({.clock = MachineClock(schedule, years + schedule.DrawTime(kSecond), rate)});
    memories.push_back(&MemoryOf(machine));
  }
}

DriverPart::DriverPart(Cluster& cluster)
    : cluster_(cluster),
      bug_(cluster.bug),
      habits_(cluster.habits),
      schedule_(cluster.schedule),
      network_(cluster.network),
      etcd_(cluster.etcd),
      fabric_(cluster.fabric),
      calls_(cluster.calls),
      machines_(cluster.machines),
      report_(cluster.report) {}

void DriverPart::Fail(const std::string& what) {
  if (!report_.failure.empty()) return;
  report_.failure = what;
  report_.at_seconds = static_cast<double>(schedule_.now()) / 1e9;
}

void DriverPart::Say(const std::string& what) const {
  static const bool aloud = std::getenv("ASHLAR_NODES_ALOUD") != nullptr;
  if (aloud) std::fprintf(stderr, "%10.3f %s\n", static_cast<double>(schedule_.now()) / 1e9, what.c_str());
}

std::vector<size_t> DriverPart::Running() const {
  std::vector<size_t> running;
  for (size_t machine = 0; machine < machines_.size(); ++machine) {
    if (machines_[machine].node != nullptr) running.push_back(machine);
  }
  return running;
}

// Not one that is frozen or stopping.
std::optional<size_t> DriverPart::AnyRunning() {
  std::vector<size_t> running = Running();
  std::erase_if(running, [this](size_t machine) {
    return At(machine)->life()->frozen_until > schedule_.now() || (machines_[machine].stops && schedule_.Chance(80));
  });
  if (running.empty()) return std::nullopt;
  return running[Draw(running.size())];
}

void DriverPart::RunUntil(Nanos end) {
  while (report_.failure.empty() && schedule_.RunNext(end)) {
  }
}

}  // namespace ashlar::simulation::nodes
