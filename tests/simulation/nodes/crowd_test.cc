// SPDX-License-Identifier: Apache-2.0
// A hundred directories on one simulated etcd: each learns of all others within its budget, whichever of them fail.
#include "tests/simulation/nodes/crowd.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>

namespace ashlar::simulation::nodes {
namespace {

// etcd is slow with an announcement, and completes it after its timeout; meanwhile the object is gone.
TEST(SimulatedDirectory, ALateWriteToEtcdChangesNothing) {
  uint64_t refused = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    Schedule schedule(seed);
    Network network(schedule, 2);
    Etcd etcd(schedule, Bug::kNone);
    const MachineClock clock(schedule, 0, 1.0);
    const auto life = std::make_shared<Life>();
    daemon::EtcdDirectoryOptions options;
    options.endpoints = {"etcd:2379"};
    DirectoryProcess directory(network, etcd, 0, life, clock, options, {}, 0, [] {});
    const auto run = [&](Nanos time) {
      const Nanos end = schedule.now() + time;
      while (schedule.RunNext(end)) {
      }
    };
    run(2 * kSecond);
    etcd.slow = 20 * kSecond;
    const NamespaceId ns{};
    const Key key{};
    directory->Announce(ns, key, {.bytes = 1}, 1);
    run(3 * kSecond);
    directory->Withdraw(ns, key, {});
    run(5 * kSecond);
    etcd.slow = 0;
    run(40 * kSecond);
    EXPECT_EQ(etcd.Count(), 1u) << "the member alone, seed " << seed;
    refused += etcd.counts().refused;
    life->ended = true;
  }
  EXPECT_GT(refused, 0u) << "no write was late";
}

// The environment's variables, for figures of other sizes: ASHLAR_CROWD_NODES, ASHLAR_CROWD_OBJECTS,
// ASHLAR_CROWD_MODELS ASHLAR_CROWD_JSON   a file for the figures
TEST(Crowd, AHundredNodesConvergeWithinTheirBudgets) {
  const auto number = [](const char* name, uint64_t otherwise) {
    const char* const text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
  };
  CrowdOptions options;
  options.nodes = number("ASHLAR_CROWD_NODES", 100);
  options.objects = number("ASHLAR_CROWD_OBJECTS", ASHLAR_CROWD_DEFAULT_OBJECTS);
  options.models = number("ASHLAR_CROWD_MODELS", 1);
  const CrowdReport report = RunCrowd(options, 1);
  const std::string json = ToJson(options, report);
  std::printf("%s\n", json.c_str());
  if (const char* const file = std::getenv("ASHLAR_CROWD_JSON")) std::ofstream(file) << json << '\n';
  EXPECT_EQ(report.failure, "");
  const double lease = options.directory.lease_seconds;
  EXPECT_LT(report.members_known, lease);
  // The budget allows this number of keys; the excess is from the first second and the members' own keys.
  EXPECT_LT(report.keys_a_node_second, 1.1 * report.budget_a_node_second);
  EXPECT_LT(report.announced, 2 * static_cast<double>(options.objects) / report.budget_a_node_second + lease);
  EXPECT_GT(report.dead_erased, 0);
  EXPECT_LT(report.dead_erased, lease + 1);
  EXPECT_GT(report.swept, 0);
  EXPECT_LT(report.emptied_members, lease);
}

// A queue has less space than a node has objects: all are announced, and announced again after etcd has lost
// everything.
TEST(Crowd, ObjectsBeyondTheQueueAreAnnouncedLater) {
  CrowdOptions options;
  options.nodes = 10;
  options.objects = 300;
  options.directory.queued_writes = 64;
  const CrowdReport report = RunCrowd(options, 1);
  EXPECT_EQ(report.failure, "") << ToJson(options, report);
}

}  // namespace
}  // namespace ashlar::simulation::nodes
