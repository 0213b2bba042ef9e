// SPDX-License-Identifier: Apache-2.0
// An operator erases a tenant in a whole cluster, including one node that was down, with its disk.
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/integration/ashlarctl_run.h"
#include "tests/nodes/peer_daemons.h"

namespace ashlar::nodes {
namespace {

using integration::Ended;
using nlohmann::json;
using testing::HasSubstr;

class EraseDaemonsTest : public PeerDaemonsTest {
 protected:
  void StartWithDisks(size_t daemons) {
    Start({.daemons = daemons,
           .etcd = true,
           .daemon = {.dram = "16MiB", .arena = "1MiB", .ssd = "64MiB", .admission = "all"},
           .complete = [this](const NodePlace& place, DaemonOptions* options) {
             options->cluster = ClusterYaml(place, certificates_.Make(place.name, authority_));
           }});
  }
  Ended Run(size_t node, const std::string& arguments) {
    return integration::RunAshlarctl(ASHLARCTL, arguments, cluster_->daemon(node).admin_socket());
  }
  json Ask(size_t node, const std::string& arguments) {
    const Ended ended = Run(node, arguments + " --json");
    EXPECT_EQ(ended.code, 0) << ended.output << cluster_->daemon(node).log();
    return json::parse(ended.output, nullptr, /*allow_exceptions=*/false);
  }
  size_t Objects(size_t node, const std::string& more = "") { return Ask(node, "ls " + more)["objects"].size(); }
  size_t HitsAt(size_t node, const std::vector<Tokens>& prompt) {
    TestEngine engine(cluster_->daemon(node).client_options());
    return Hits(engine.Lookup(prompt));
  }
  void AwaitOnDisk(size_t node, size_t objects) {
    ASSERT_TRUE(Eventually([&] { return Objects(node, "--tier ssd") == objects; })) << cluster_->daemon(node).log();
  }
};

TEST_F(EraseDaemonsTest, PresentNodesEraseAndAnAbsentOneDoesOnReturn) {
  StartWithDisks(3);
  const std::vector<Tokens> prompt = NewPrompt(), later = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  for (const size_t node : {1, 2}) ExpectToLandInTheEnd(cluster_->daemon(node), prompt);
  for (const size_t node : {0, 1, 2}) AwaitOnDisk(node, prompt.size());
  cluster_->daemon(2).Kill();

  const json done = Ask(0, "erase --tenant default");  // it waits until node 2 counts as absent
  EXPECT_EQ(done["objects"], prompt.size());
  EXPECT_EQ(done["nodes"], json::parse(R"([{"node": "node0", "done": true}, {"node": "node1", "done": true}])"));
  EXPECT_TRUE(done["done"].get<bool>());
  for (const size_t node : {0, 1}) {
    EXPECT_EQ(Objects(node), 0u) << node;
    EXPECT_EQ(HitsAt(node, prompt), 0u) << node;
  }

  cluster_->daemon(2).Start();
  const bool erased = Eventually([&] {
    EXPECT_EQ(HitsAt(0, prompt), 0u) << "nothing comes back from the node that had it";
    return Objects(2) == 0;
  });
  ASSERT_TRUE(erased) << cluster_->daemon(2).log();
  const auto says_so = [&] { return absl::StrContains(cluster_->daemon(2).log(), "erasure done"); };
  ASSERT_TRUE(Eventually(says_so)) << cluster_->daemon(2).log();
  EXPECT_EQ(HitsAt(1, prompt), 0u);

  // The tenant continues on all nodes; and an erasure that was done is not repeated.
  Publish(cluster_->daemon(2), later);
  ExpectToLandInTheEnd(cluster_->daemon(0), later);
  AwaitOnDisk(2, later.size());
  cluster_->daemon(2).Kill();
  cluster_->daemon(2).Start();
  ASSERT_TRUE(Eventually([&] { return cluster_->daemon(2).Metric("ashlar_cluster_members") == 3; }));
  EXPECT_EQ(Objects(2, "--tier ssd"), later.size());
  ExpectToLandInTheEnd(cluster_->daemon(1), later);
}

TEST_F(EraseDaemonsTest, EraseNeedsDirectoryUnlessThisNodeOnly) {
  StartWithDisks(2);
  const std::vector<Tokens> prompt = NewPrompt();
  Publish(cluster_->daemon(0), prompt);
  ExpectToLandInTheEnd(cluster_->daemon(1), prompt);
  cluster_->etcd().Kill();
  ASSERT_TRUE(Eventually([&] { return cluster_->daemon(0).Metric("ashlar_directory_connected") == 0; }));
  const Ended refused = Run(0, "erase --tenant default");
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.output, HasSubstr("the directory is not reachable"));
  EXPECT_EQ(Objects(0), prompt.size());
  const json here = Ask(0, "erase --tenant default --this-node");
  EXPECT_EQ(here["objects"], prompt.size());
  EXPECT_EQ(here["nodes"], json::array());
  EXPECT_EQ(Objects(0), 0u);
  EXPECT_EQ(Objects(1), prompt.size());
}

TEST_F(EraseDaemonsTest, ANodeThatCannotAcknowledgeShowsInMetrics) {
  StartWithDisks(2);
  Publish(cluster_->daemon(0), NewPrompt());
  // The second node cannot record its erasure.
  const std::string in_the_way = cluster_->daemon(1).ssd_folder() + "/forgotten.part";
  ASSERT_TRUE(std::filesystem::create_directory(in_the_way));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(Run(0, "erase --tenant default --seconds 1").code, 1);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
  const auto waits = [this](size_t node, const std::string& location) {
    return cluster_->daemon(node).Metric("ashlar_erasures_pending{location=\"" + location + "\"}") == 1 &&
           cluster_->daemon(node).Metric("ashlar_erasures_oldest_age_seconds{location=\"" + location + "\"}") > 0;
  };
  EXPECT_TRUE(Eventually([&] { return waits(1, "local") && waits(0, "remote"); }));
  EXPECT_EQ(cluster_->daemon(0).Metric("ashlar_erasures_pending{location=\"local\"}"), 0);
  EXPECT_THAT(cluster_->daemon(1).log(), HasSubstr("cannot record a completed erasure"));
  std::filesystem::remove(in_the_way);
  EXPECT_TRUE(Eventually([&] { return !waits(1, "local") && !waits(0, "remote"); }));
}

}  // namespace
}  // namespace ashlar::nodes
