// SPDX-License-Identifier: Apache-2.0
#include "examples/testing/local_nodes.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::tools {
namespace {

// Each node announces its objects even if they were used only once. A lookup waits longer for other nodes than in
// operation, because processes of one machine share its cores with the computing engine.
std::string ClusterYaml(size_t node, uint16_t control_port, uint16_t transport_port, const std::string& etcd,
                        uint32_t lease_seconds) {
  return absl::StrCat(
      "cluster:\n  node: node", node, "\n  control_address: 127.0.0.1:", control_port,
      "\n  transport_address: 127.0.0.1:", transport_port,
      "\n  announce: all\n  lookup_milliseconds: 2000\n  tls: {insecure: true}\n  etcd: {endpoints: [\"", etcd,
      "\"], lease_seconds: ", lease_seconds, "}\n");
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalNodes>> LocalNodes::Start(std::vector<LocalDaemonOptions> options,
                                                              uint32_t lease_seconds) {
  std::unique_ptr<LocalNodes> nodes(new LocalNodes());
  const size_t count = options.size();
  std::vector<uint16_t> ports;
  if (count > 1) {
    absl::StatusOr<std::unique_ptr<LocalEtcd>> etcd = LocalEtcd::Start();
    if (!etcd.ok()) return etcd.status();
    nodes->etcd_ = std::move(*etcd);
    absl::StatusOr<std::vector<uint16_t>> free = FreePorts(2 * count);
    if (!free.ok()) return free.status();
    ports = std::move(*free);
  }
  for (size_t node = 0; node < count; ++node) {
    LocalDaemonOptions& each = options[node];
    if (count > 1) {
      each.cluster = ClusterYaml(node, ports[2 * node], ports[2 * node + 1], nodes->etcd_->endpoint(), lease_seconds);
    }
    nodes->options_.push_back(each);
    nodes->daemons_.emplace_back();
    if (absl::Status status = nodes->Restart(node); !status.ok()) return status;
  }
  return nodes;
}

absl::Status LocalNodes::Restart(size_t node) {
  daemons_[node] = nullptr;
  absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start(options_[node]);
  if (!daemon.ok()) {
    return absl::Status(daemon.status().code(), absl::StrCat("node", node, ": ", daemon.status().message()));
  }
  daemons_[node] = std::move(*daemon);
  return absl::OkStatus();
}

}  // namespace ashlar::tools
