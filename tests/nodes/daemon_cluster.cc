#include "tests/nodes/daemon_cluster.h"

namespace ashlar::nodes {
namespace {

// Any: a node's stack has no other servers.
constexpr char kControlPort[] = ":7461", kTransportPort[] = ":7462";

NetworkOptions NetworkOf(const ClusterOptions& options) {
  NetworkOptions network = options.network;
  network.nodes = options.daemons + (options.etcd ? 1 : 0);
  return network;
}

}  // namespace

std::string DaemonCluster::WhyNot(bool etcd) {
  const std::string why = Network::WhyNot();
  return why.empty() && etcd ? daemon::EtcdProcess::WhyNot() : why;
}

DaemonCluster::DaemonCluster(const ClusterOptions& options) : has_etcd_(options.etcd), network_(NetworkOf(options)) {
  if (has_etcd_) {
    daemon::EtcdOptions etcd = options.etcd_options;
    etcd.address = Network::address(options.daemons);
    etcd.network_namespace = network_.stack(options.daemons);
    etcd_ = std::make_unique<daemon::EtcdProcess>(etcd);
  }
  for (size_t node = 0; node < options.daemons; ++node) {
    integration::DaemonOptions daemon = options.daemon;
    daemon.network_namespace = network_.stack(node);
    if (options.complete) options.complete(place(node), &daemon);
    daemons_.push_back(std::make_unique<integration::DaemonProcess>(daemon));
  }
}

NodePlace DaemonCluster::place(size_t node) const {
  NodePlace place{.node = node, .name = "node" + std::to_string(node), .address = Network::address(node)};
  place.control_address = place.address + kControlPort;
  place.transport_address = place.address + kTransportPort;
  if (has_etcd_) place.etcd_endpoints.push_back(etcd_->endpoint());
  return place;
}

double DaemonCluster::Sum(const std::string& sample) const {
  double sum = 0;
  for (const auto& daemon : daemons_) sum += daemon->Metric(sample);
  return sum;
}

}  // namespace ashlar::nodes
