// SPDX-License-Identifier: Apache-2.0
// Daemons that stop one after another transfer objects that only their memory has to the remaining ones.
#include <vector>

#include "tests/nodes/peer_daemons.h"

namespace ashlar::nodes {
namespace {

class DrainTransferTest : public PeerDaemonsTest {
 protected:
  void StartWithoutDisks(size_t daemons, const std::string& dram) {
    Start({.daemons = daemons,
           .etcd = true,
           .daemon = {.dram = dram, .drain_seconds = 15},
           .complete = [this](const NodePlace& place, DaemonOptions* options) {
             options->cluster = ClusterYaml(place, certificates_.Make(place.name, authority_));
           }});
  }
  // Waits until each daemon has a connection to all others.
  void AwaitPeers() {
    for (size_t i = 0; i < cluster_->daemons(); ++i) {
      const auto others = static_cast<double>(cluster_->daemons() - 1);
      ASSERT_TRUE(Eventually([&] { return cluster_->daemon(i).Metric("ashlar_peers_connected") == others; }))
          << cluster_->daemon(i).log();
    }
  }
  // On whichever tier or node the prompt is.
  static void ExpectFound(DaemonProcess& daemon, const std::vector<Tokens>& prompt) {
    TestEngine engine(daemon.client_options());
    std::optional<Match> match;
    const bool found = Eventually([&] {
      match.emplace(engine.Lookup(prompt));
      return Hits(*match) == prompt.size();
    });
    ASSERT_TRUE(found) << daemon.log();
    Landing landing = engine.Land(*match, prompt);
    ASSERT_THAT(landing.Wait(integration::kPatience), testing::Each(MissReason::kNone)) << daemon.log();
  }
};

TEST_F(DrainTransferTest, ADrainTransfersItsObjectsToOtherNodes) {
  StartWithoutDisks(3, "64MiB");
  AwaitPeers();
  std::vector<std::vector<Tokens>> prompts;
  for (int i = 0; i < 8; ++i) {
    prompts.push_back(NewPrompt());
    Publish(cluster_->daemon(0), prompts.back());
  }
  EXPECT_EQ(cluster_->daemon(0).Terminate(), 0);
  EXPECT_THAT(cluster_->daemon(0).log(), testing::HasSubstr("drained"));
  const std::string taken = "ashlar_offered_bytes_total{direction=\"received\"}";
  EXPECT_TRUE(Eventually([&] { return cluster_->daemon(1).Metric(taken) + cluster_->daemon(2).Metric(taken) > 0; }));
  for (const auto& prompt : prompts) ExpectFound(cluster_->daemon(1), prompt);
}

// Objects that fit on other nodes are never lost, although every daemon is restarted once, none has a disk, and no
// engine requests them meanwhile.
TEST_F(DrainTransferTest, ARollingUpdateLosesNothing) {
  StartWithoutDisks(3, "64MiB");
  AwaitPeers();
  std::vector<std::vector<Tokens>> prompts;
  for (size_t i = 0; i < 9; ++i) {
    prompts.push_back(NewPrompt());
    Publish(cluster_->daemon(i % 3), prompts.back());
  }
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(cluster_->daemon(i).Terminate(), 0);
    EXPECT_THAT(cluster_->daemon(i).log(), testing::Not(testing::HasSubstr("drain timed out")));
    cluster_->daemon(i).Start();
    AwaitPeers();
  }
  for (const auto& prompt : prompts) {
    for (size_t i = 0; i < 3; ++i) ExpectFound(cluster_->daemon(i), prompt);
  }
}

}  // namespace
}  // namespace ashlar::nodes
