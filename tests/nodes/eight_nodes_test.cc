// SPDX-License-Identifier: Apache-2.0
// Eight daemons, each in a separate network namespace, and etcd in a ninth.
#include <memory>
#include <vector>

#include "tests/nodes/peer_daemons.h"

namespace ashlar::nodes {
namespace {

constexpr size_t kNodes = 8, kKilled = 3, kRestarted = 5;

class EightNodesTest : public PeerDaemonsTest {
 protected:
  void StartAll() {
    Start({.daemons = kNodes, .etcd = true, .complete = [this](const NodePlace& place, DaemonOptions* options) {
             options->cluster = ClusterYaml(place, certificates_.Make(place.name, authority_)) + "  replicate: never\n";
           }});
    for (size_t node = 0; node < kNodes; ++node) MakeEngine(node);
  }
  void MakeEngine(size_t node) {
    engines_[node] = std::make_unique<TestEngine>(cluster_->daemon(node).client_options());
  }
  // Every running daemon knows which others run, and is connected to them.
  bool KnowEachOther(size_t running) const {
    for (size_t node = 0; node < kNodes; ++node) {
      const DaemonProcess& daemon = cluster_->daemon(node);
      if (daemon.pid() < 0) continue;
      if (daemon.Metric("ashlar_cluster_members") != static_cast<double>(running)) return false;
      if (daemon.Metric("ashlar_peers_connected") != static_cast<double>(running - 1)) return false;
    }
    return true;
  }
  // Every daemon has an entry of each object of the others, and none of objects that are gone.
  bool KnowAllObjects() const {
    const double objects = cluster_->Sum("ashlar_objects");
    for (size_t node = 0; node < kNodes; ++node) {
      const DaemonProcess& daemon = cluster_->daemon(node);
      if (daemon.pid() < 0) continue;
      if (daemon.Metric("ashlar_directory_entries") != objects - daemon.Metric("ashlar_objects")) return false;
    }
    return true;
  }
  void TearDown() override {
    for (auto& engine : engines_) engine = nullptr;
    PeerDaemonsTest::TearDown();
  }

  std::unique_ptr<TestEngine> engines_[kNodes];
};

TEST_F(EightNodesTest, FindEachOthersObjectsAndConvergeAfterADeathAndARestart) {
  StartAll();
  std::vector<std::vector<Tokens>> prompts;
  for (size_t node = 0; node < kNodes; ++node) {
    prompts.push_back(NewPrompt());
    engines_[node]->PublishPrompt(prompts[node]);
  }
  const Stopwatch published;
  ASSERT_TRUE(Eventually([&] { return KnowEachOther(kNodes) && KnowAllObjects(); }));
  Figure("until every node knows what all others have published, ms", published.ms());
  const Stopwatch since;
  for (size_t node = 0; node < kNodes; ++node) {
    for (size_t other = 0; other < kNodes; ++other) {
      ExpectToLand(cluster_->daemon(node), prompts[other], /*remote=*/other != node);
    }
  }
  Figure("until every node has landed what all others have published, ms", since.ms());

  // The last prompt of the first daemon dies with it, and so does that of the second, which restarts empty.
  std::vector<std::vector<Tokens>> last;
  for (size_t node = 0; node < kNodes; ++node) {
    last.push_back(NewPrompt());
    engines_[node]->PublishPrompt(last[node]);
  }
  ASSERT_TRUE(Eventually([&] { return KnowAllObjects(); }));
  for (const size_t node : {kKilled, kRestarted}) {
    cluster_->daemon(node).Kill();
    engines_[node] = nullptr;
  }
  const Stopwatch killed;
  cluster_->daemon(kRestarted).Start();
  MakeEngine(kRestarted);
  EXPECT_TRUE(Eventually([&] { return KnowEachOther(kNodes - 1); }));
  for (size_t node = 0; node < kNodes; ++node) {
    for (const size_t gone : {kKilled, kRestarted}) {
      if (node == kKilled) continue;
      EXPECT_EQ(Hits(engines_[node]->Lookup(last[gone])), 0u) << node;
    }
  }
  EXPECT_LT(killed.ms(), 2 * kLeaseMs + 3000) << "two leases, and patience for a busy machine";
  Figure("until all are connected, and believe nothing of what is gone, ms", killed.ms());
  EXPECT_TRUE(Eventually([&] { return KnowAllObjects(); }));
  Figure("until all know what is there, and the keys of what is gone are swept, ms", killed.ms());
  const Stopwatch converged;
  for (size_t node = 0; node < kNodes; ++node) {
    for (size_t other = 0; other < kNodes; ++other) {
      if (node == kKilled || other == kKilled || other == kRestarted) continue;
      ExpectToLand(cluster_->daemon(node), last[other], /*remote=*/other != node);
    }
  }
  // Others have copies of what landed before.
  for (const auto& prompt : prompts) ExpectToLand(cluster_->daemon(kRestarted), prompt, true);
  Figure("until every node has landed what is there, ms", converged.ms());
}

}  // namespace
}  // namespace ashlar::nodes
