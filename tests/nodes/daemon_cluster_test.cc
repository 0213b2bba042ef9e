// SPDX-License-Identifier: Apache-2.0
// A daemon on each node, without a cluster: each serves its own engines, whatever happens to the others.
#include "tests/nodes/daemon_cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>
#include <set>

#include "absl/time/time.h"
#include "tests/integration/test_engine.h"
#include "tests/nodes/traffic.h"

namespace ashlar::nodes {
namespace {

using integration::DaemonOptions;
using integration::DaemonProcess;
using integration::Eventually;
using integration::InNetworkNamespace;
using integration::MakePrompt;
using integration::TestEngine;
using integration::Tokens;

constexpr std::byte kPoison{0x5a};

class DaemonClusterTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
  }
  const uint64_t seed_ = std::random_device{}();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, seed_};
};

ino_t StackOf(pid_t pid) {
  struct stat stat {};
  EXPECT_EQ(::stat(("/proc/" + std::to_string(pid) + "/ns/net").c_str(), &stat), 0);
  return stat.st_ino;
}

size_t Hits(const Match& match) {
  size_t hits = 0;
  for (const SegmentResult& segment : match.segments()) hits += segment.reason == MissReason::kNone;
  return hits;
}

// Publishes a prompt to that daemon, and lands it from there.
void PublishAndHit(DaemonProcess& daemon, const std::vector<Tokens>& prompt) {
  TestEngine engine(daemon.client_options());
  EXPECT_EQ(Hits(engine.Lookup(prompt)), 0u);
  engine.PublishPrompt(prompt);
  engine.FillTargets(kPoison);
  const Match match = engine.Lookup(prompt);
  EXPECT_EQ(Hits(match), prompt.size());
  Landing landing = engine.Land(match, prompt);
  EXPECT_THAT(landing.Wait(integration::kPatience), testing::Each(MissReason::kNone));
  uint64_t position = 0;
  for (size_t i = 0; i < prompt.size(); ++i) {
    engine.ExpectLanded(i == 0 ? ObjectKind::kCheckpoint : ObjectKind::kSegment, prompt[i], position, kPoison);
    position += prompt[i].size();
  }
}

// By the daemon's own clock.
absl::Time FirstTime(const DaemonProcess& daemon) {
  const std::string log = daemon.log();
  absl::Time time;
  std::string error;
  EXPECT_TRUE(absl::ParseTime(absl::RFC3339_full, log.substr(0, log.find(' ')), &time, &error)) << error;
  return time;
}

TEST_F(DaemonClusterTest, EachServesItsOwn) {
  DaemonCluster cluster;
  std::set<ino_t> stacks;
  for (size_t node = 0; node < cluster.daemons(); ++node) {
    stacks.insert(StackOf(cluster.daemon(node).pid()));
    // A different prompt per node: a prompt from another node would be an immediate hit.
    PublishAndHit(cluster.daemon(node), MakePrompt(seed_, 2, 60));
  }
  EXPECT_EQ(stacks.size(), 3u);
  EXPECT_EQ(stacks.count(StackOf(::getpid())), 0u);
}

TEST_F(DaemonClusterTest, SurvivesKilledFrozenAndRestartedNode) {
  DaemonCluster cluster({.daemons = 2});
  TestEngine engine(cluster.daemon(1).client_options());
  EXPECT_TRUE(Eventually([&] { return cluster.Sum("ashlar_sessions") == 1; }));
  cluster.daemon(0).Kill();
  const std::vector<Tokens> prompt = MakePrompt(seed_, 2, 60);
  PublishAndHit(cluster.daemon(1), prompt);
  cluster.daemon(0).Start();
  cluster.daemon(1).Freeze();
  PublishAndHit(cluster.daemon(0), prompt);
  cluster.daemon(1).Thaw();
  EXPECT_EQ(Hits(engine.Lookup(prompt)), 2u);
}

TEST_F(DaemonClusterTest, NodesReachEtcdUntilItIsCutOff) {
  DaemonCluster cluster({.daemons = 2, .etcd = true});
  for (size_t node = 0; node < 2; ++node) {
    ASSERT_EQ(cluster.place(node).etcd_endpoints, std::vector<std::string>{cluster.etcd().endpoint()});
    const InNetworkNamespace there(cluster.network().stack(node));
    const auto reaches = [&] {
      const int fd = Dial(Network::address(cluster.etcd_node()), 2379, std::chrono::milliseconds(300));
      if (fd >= 0) ::close(fd);
      return fd >= 0;
    };
    EXPECT_TRUE(Eventually(reaches));
    cluster.network().SetAround(cluster.etcd_node(), {.cut = true});
    EXPECT_FALSE(reaches());
    cluster.network().Heal();
    EXPECT_TRUE(Eventually(reaches));
  }
}

TEST_F(DaemonClusterTest, EachIsConfiguredForItsNodeDespiteClockSkew) {
  const std::vector<std::string> off = ClockOff("+1h");
  if (off.empty()) GTEST_SKIP() << "faketime is not installed, or a sanitizer keeps it out";
  std::vector<std::string> names;
  DaemonCluster cluster({.daemons = 2, .complete = [&](const NodePlace& place, DaemonOptions* options) {
                           names.push_back(place.name + " " + place.control_address + " " + place.transport_address);
                           if (place.node == 1) options->environment = off;
                         }});
  EXPECT_EQ(names,
            (std::vector<std::string>{"node0 10.77.0.1:7461 10.77.0.1:7462", "node1 10.77.0.2:7461 10.77.0.2:7462"}));
  for (size_t node = 0; node < 2; ++node) PublishAndHit(cluster.daemon(node), MakePrompt(seed_, 2, 60));
  const absl::Duration apart = FirstTime(cluster.daemon(1)) - FirstTime(cluster.daemon(0));
  EXPECT_GT(apart, absl::Minutes(55));
  EXPECT_LT(apart, absl::Minutes(65));
}

}  // namespace
}  // namespace ashlar::nodes
