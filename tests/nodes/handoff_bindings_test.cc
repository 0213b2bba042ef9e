// SPDX-License-Identifier: Apache-2.0
// Finished prompts that C and Python engines hand off to the daemon of another node.
#include <gtest/gtest.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/testing/child_process.h"
#include "tests/nodes/daemon_cluster.h"

namespace ashlar::nodes {
namespace {

using integration::DaemonOptions;
using integration::Eventually;

class HandoffBindings : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = DaemonCluster::WhyNot(/*etcd=*/true); !why.empty()) GTEST_SKIP() << why;
    cluster_.emplace(ClusterOptions{
        .daemons = 2,
        .etcd = true,
        .complete =
            [](const NodePlace& place, DaemonOptions* options) {
              options->cluster =
                  absl::StrCat("cluster:\n  node: ", place.name, "\n  control_address: ", place.control_address,
                               "\n  transport_address: ", place.transport_address, "\n  tls: {insecure: true}",
                               "\n  etcd: {endpoints: [\"", place.etcd_endpoints[0], "\"], lease_seconds: 3}\n");
            },
        .network = {.relay = false}});
    for (const size_t node : {0, 1}) {
      EXPECT_TRUE(Eventually([&] { return cluster_->daemon(node).Metric("ashlar_peers_connected") == 1; }));
    }
  }
  std::vector<std::string> Sockets(size_t node) {
    const ClientOptions options = cluster_->daemon(node).client_options();
    return {options.rpc_socket, options.session_socket};
  }
  // Expects that a program ends well.
  void Run(std::vector<std::string> command, const std::vector<std::vector<std::string>>& arguments,
           const std::vector<std::string>& environment = {}) {
    for (const std::vector<std::string>& some : arguments) command.insert(command.end(), some.begin(), some.end());
    const std::string log = cluster_->daemon(0).directory() + "/bindings.log";
    daemon::ChildProcess program;
    program.Start({.command = command, .environment = environment, .log = log});
    const int code = program.Wait();
    std::ostringstream said;
    said << std::ifstream(log).rdbuf();
    EXPECT_EQ(code, 0) << said.str();
  }

  std::optional<DaemonCluster> cluster_;
};

TEST_F(HandoffBindings, AnEngineInCHandsATextToAnotherNode) {
  Run({CALLS_C, "handoff"}, {Sockets(0), {"nobody", "no_node"}});
  Run({CALLS_C, "handoff"}, {Sockets(0), {"node1", "completed"}});
  Run({CALLS_C, "resume"}, {Sockets(1)});
}

#ifdef PYTHON
TEST_F(HandoffBindings, AnEngineInPythonHandsATextToAnotherNode) {
  Run({PYTHON, HANDOFF_PY}, {Sockets(0), {"node1"}, Sockets(1)},
      {"PYTHONPATH=" PYTHON_PATH, "PYTHONDONTWRITEBYTECODE=1"});
}
#endif

}  // namespace
}  // namespace ashlar::nodes
