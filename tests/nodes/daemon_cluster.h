// SPDX-License-Identifier: Apache-2.0
// DaemonCluster: a daemon on each node of a network, and etcd on one more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/testing/etcd_process.h"
#include "tests/integration/daemon_process.h"
#include "tests/nodes/network.h"

namespace ashlar::nodes {

// The facts from which one node's configuration is made.
struct NodePlace {
  size_t node = 0;
  std::string name;                         // node0, node1, …
  std::string address;                      // IPv4
  std::string control_address;              // HOST:PORT, for other nodes' calls
  std::string transport_address;            // HOST:PORT, for their bytes
  std::vector<std::string> etcd_endpoints;  // HOST:PORT; empty without etcd
};

struct ClusterOptions {
  size_t daemons = 3;
  bool etcd = false;
  // Options of `etcd`; the cluster sets its address and network stack.
  daemon::EtcdOptions etcd_options;
  integration::DaemonOptions daemon;  // options of each daemon; the cluster sets its network stack
  // Completes them for one node: the field `cluster`, an environment (ClockOff), another program. Empty: nothing.
  std::function<void(const NodePlace& place, integration::DaemonOptions* options)> complete;
  NetworkOptions network;  // the cluster sets the number of nodes
};

class DaemonCluster {
 public:
  // Returns why this is impossible here; empty: possible.
  static std::string WhyNot(bool etcd = false);

  // Starts etcd, then the daemons, and waits until each serves. Failures are test failures.
  explicit DaemonCluster(const ClusterOptions& options = {});

  size_t daemons() const { return daemons_.size(); }
  integration::DaemonProcess& daemon(size_t node) { return *daemons_[node]; }
  daemon::EtcdProcess& etcd() { return *etcd_; }
  Network& network() { return network_; }
  size_t etcd_node() const { return daemons_.size(); }  // index of etcd's node in the network
  NodePlace place(size_t node) const;

  // The sum over all daemons, which must all be running, of a sample as DaemonProcess::Metric names it.
  double Sum(const std::string& sample) const;

  // Keys of the default cluster in etcd: of members (`m`), entries (`e`) or erasures (`f`). Negative: no answer.
  int64_t KeysInEtcd(char kind) const;
  // Makes etcd keep a node's member key after its lease ends, so that the others still believe in a node that has left.
  // Returns that key, for RemoveMember; empty: there was none.
  std::string KeepMember(size_t node) const;
  void RemoveMember(const std::string& key) const;
  // Returns the gauges of running daemons that still hold something for engines or for each other, one line each, and
  // the superfluous keys in etcd; empty: there are none. `all_announced`: etcd must have an entry of each object.
  std::string Held(bool all_announced) const;

 private:
  // Returns etcd's answer over HTTP, with its header; empty if there is none.
  std::string AskEtcd(const std::string& path, const std::string& body) const;

  const bool has_etcd_;
  Network network_;
  std::unique_ptr<daemon::EtcdProcess> etcd_;
  std::vector<std::unique_ptr<integration::DaemonProcess>> daemons_;
};

}  // namespace ashlar::nodes
