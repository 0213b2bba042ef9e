// SPDX-License-Identifier: Apache-2.0
// Daemons of one cluster, each in a separate network namespace, with a real etcd and mutual TLS: each daemon's objects
// serve the engines of the others, and a fault between them costs engines at most a miss.
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tests/integration/ashlarctl_run.h"
#include "tests/nodes/peer_daemons.h"
#include "tools/ashlarctl/json_fields.h"

namespace ashlar::nodes {
namespace {

TEST_F(PeerDaemonsTest, OperatorsSeeEachPeer) {
  Start(3);
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), prompt, /*remote=*/true);
  const auto run = [this](size_t node, const std::string& arguments) {
    return integration::RunAshlarctl(ASHLARCTL, arguments, cluster_->daemon(node).admin_socket()).output;
  };
  std::set<std::string> documented;
  for (const ctl::JsonField& field : ctl::JsonFieldsOf("peers")) documented.insert(field.path);
  nlohmann::json from, to;
  // The transport's figures are at most one second old.
  ASSERT_TRUE(Eventually([&] {
    from = nlohmann::json::parse(run(1, "peers --json"))["peers"];
    return from.size() == 2 && from[0]["protocol"] == "am";
  })) << from.dump(2);
  EXPECT_EQ(from[0]["node"], "node0");
  EXPECT_EQ(from[1]["node"], "node2");
  for (const auto& peer : from) {
    for (const auto& [name, value] : peer.items()) EXPECT_TRUE(documented.contains("peers[]." + name)) << name;
    EXPECT_EQ(peer.size(), documented.size());
    EXPECT_TRUE(peer["connected"].get<bool>());
  }
  EXPECT_GT(from[0]["received_bytes"], 0);
  EXPECT_GT(from[0]["bytes_per_second"], 0.0);
  EXPECT_GT(from[0]["rtt_seconds"], 0.0);
  EXPECT_EQ(from[1]["received_bytes"], 0);
  to = nlohmann::json::parse(run(0, "peers --json"))["peers"];
  EXPECT_EQ(to[0]["node"], "node1");
  EXPECT_GT(to[0]["sent_bytes"], 0);
  EXPECT_THAT(run(1, "peers"), testing::HasSubstr("node0: connected"));
  EXPECT_GT(cluster_->daemon(1).Metric("ashlar_peer_bytes_total{direction=\"received\",peer=\"node0\"}"), 0);
}

TEST_F(PeerDaemonsTest, ObjectsOfOneNodeServeOthers) {
  Start(3);
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), prompt, /*remote=*/true);
  ExpectToLand(cluster_->daemon(1), prompt, /*remote=*/false);
  cluster_->daemon(0).Kill();
  ExpectToLand(cluster_->daemon(2), prompt, /*remote=*/true);
}

TEST_F(PeerDaemonsTest, AKilledHolderIsAMissUntilItReturns) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  Publish(cluster_->daemon(0), first);
  ExpectToLand(cluster_->daemon(1), first, true);
  Publish(cluster_->daemon(0), second);
  cluster_->daemon(0).Kill();
  TestEngine engine(cluster_->daemon(1).client_options());
  EXPECT_EQ(Hits(engine.Lookup(second)), 0u);
  cluster_->daemon(0).Start();
  Publish(cluster_->daemon(0), second);
  ExpectToLand(cluster_->daemon(1), second, true);
}

TEST_F(PeerDaemonsTest, ALossySlowLinkOnlyCostsTime) {
  Start(2);
  cluster_->network().SetBetween(0, 1, {.loss = 0.01, .delay = std::chrono::milliseconds(200)});
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), prompt, true);
  EXPECT_EQ(cluster_->daemon(1).Metric("ashlar_remote_fetch_failures_total"), 0);
}

// A round trip takes longer than the timeout that is used for an unmeasured link.
TEST_F(PeerDaemonsTest, TimeoutsFollowTheLinksMeasuredTime) {
  Start(2);
  cluster_->network().SetBetween(0, 1, {.delay = std::chrono::milliseconds(520)});
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), prompt, true);
  EXPECT_EQ(cluster_->daemon(1).Metric("ashlar_remote_fetch_failures_total"), 0);
}

TEST_F(PeerDaemonsTest, ACutLinkIsAMissUntilItHeals) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  Publish(cluster_->daemon(0), first);
  ExpectToLand(cluster_->daemon(1), first, true);
  Publish(cluster_->daemon(0), second);
  cluster_->network().SetBetween(0, 1, {.cut = true});
  {
    TestEngine engine(cluster_->daemon(1).client_options());
    EXPECT_EQ(Hits(engine.Lookup(second)), 0u);
    EXPECT_EQ(Hits(engine.Lookup(first)), first.size()) << "what is here is here";
  }
  cluster_->network().Heal();
  ExpectToLand(cluster_->daemon(1), second, true);
}

TEST_F(PeerDaemonsTest, UsesKnownEntriesWithoutEtcd) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  for (const auto& prompt : {first, second}) Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), first, true);
  cluster_->etcd().Kill();
  ExpectToLand(cluster_->daemon(1), second, true);
  const std::vector<Tokens> third = NewPrompt();
  Publish(cluster_->daemon(0), third);
  ExpectToLand(cluster_->daemon(0), third, false);
  cluster_->etcd().Start();
  ExpectToLand(cluster_->daemon(1), third, true);
}

TEST_F(PeerDaemonsTest, AnEmptiedEtcdIsFilledAgain) {
  Start(2);
  const std::vector<Tokens> first = NewPrompt(), second = NewPrompt();
  for (const auto& prompt : {first, second}) Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(1), first, true);
  cluster_->etcd().Kill();
  cluster_->etcd().Wipe();
  cluster_->etcd().Start();
  cluster_->daemon(1).Kill();  // its measurements are lost as well
  cluster_->daemon(1).Start();
  ExpectToLand(cluster_->daemon(1), second, true);
}

// One node's certificate is from another authority: the node gets nothing, and serves its own engines.
TEST_F(PeerDaemonsTest, AForeignPeerIsRefused) {
  const TestAuthority foreign("foreign");
  Start({.daemons = 3, .etcd = true, .complete = [&](const NodePlace& place, DaemonOptions* options) {
           const TestAuthority& signer = place.node == 1 ? foreign : authority_;
           options->cluster = ClusterYaml(place, certificates_.Make(place.name, signer));
         }});
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLand(cluster_->daemon(2), prompt, true);
  TestEngine engine(cluster_->daemon(1).client_options());
  EXPECT_EQ(Hits(engine.Lookup(prompt)), 0u);
  engine.PublishPrompt(prompt);
  EXPECT_EQ(Hits(engine.Lookup(prompt)), prompt.size());
}

}  // namespace
}  // namespace ashlar::nodes
