// SPDX-License-Identifier: Apache-2.0
#include "tests/nodes/daemon_cluster.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "tests/nodes/traffic.h"

namespace ashlar::nodes {
namespace {

constexpr uint16_t kEtcdPort = 2379;
// Gauges of held resources. All are 0 once every engine has disconnected.
constexpr const char* kHeld[] = {"ashlar_sessions",
                                 "ashlar_leases",
                                 "ashlar_reservations_pending",
                                 "ashlar_landings_in_progress",
                                 "ashlar_compositions_in_progress",
                                 "ashlar_regions",
                                 "ashlar_region_bytes",
                                 "ashlar_peer_leases",
                                 "ashlar_transport_grants",
                                 "ashlar_transport_transfers_in_progress",
                                 "ashlar_transport_pinned_ranges",
                                 "ashlar_prefill_plans_in_progress",
                                 "ashlar_prefill_pending_segments",
                                 "ashlar_prefill_assigned_segments"};

// Accepts any name: a node's stack has no other servers.
constexpr char kControlPort[] = ":7461", kTransportPort[] = ":7462";

NetworkOptions NetworkOf(const ClusterOptions& options) {
  NetworkOptions network = options.network;
  network.nodes = options.daemons + (options.etcd ? 1 : 0);
  return network;
}

// The sum of a metric's samples; negative: there are none.
double SumOf(const std::string& metrics, const std::string& name) {
  double sum = -1;
  std::istringstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    const bool is = line.rfind(name, 0) == 0 && (line[name.size()] == ' ' || line[name.size()] == '{');
    if (is) sum = std::max(sum, 0.0) + std::strtod(line.c_str() + line.rfind(' '), nullptr);
  }
  return sum;
}

// A request in etcd's JSON for all keys of a kind.
std::string RangeOf(char kind) {
  const std::string begin = std::string("/ashlar/default/") + kind, end = std::string("/ashlar/default/") + ++kind;
  return absl::StrCat("\"key\":\"", absl::Base64Escape(begin), "\",\"range_end\":\"", absl::Base64Escape(end), "\"");
}

// The first string with that name in JSON; empty if there is none.
std::string FieldOf(const std::string& json, const std::string& name) {
  const std::string begin = "\"" + name + "\":\"";
  const size_t at = json.find(begin);
  if (at == std::string::npos) return "";
  return json.substr(at + begin.size(), json.find('"', at + begin.size()) - at - begin.size());
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

std::string DaemonCluster::AskEtcd(const std::string& path, const std::string& body) const {
  const integration::InNetworkNamespace there(network_.stack(etcd_node()));
  return Post(Network::address(etcd_node()), kEtcdPort, path, body);
}

int64_t DaemonCluster::KeysInEtcd(char kind) const {
  const std::string answer = AskEtcd("/v3/kv/range", absl::StrCat("{", RangeOf(kind), ",\"count_only\":true}"));
  if (answer.find(" 200 ") == std::string::npos) return -1;
  const std::string count = FieldOf(answer, "count");  // omitted if it is 0
  return std::strtoll(count.c_str(), nullptr, 10);
}

std::string DaemonCluster::KeepMember(size_t node) const {
  const std::string answer = AskEtcd("/v3/kv/range", absl::StrCat("{", RangeOf('m'), "}"));
  for (size_t at = answer.find("{\"key\":"); at != std::string::npos; at = answer.find("{\"key\":", at + 1)) {
    const std::string key = FieldOf(answer.substr(at), "key"), value = FieldOf(answer.substr(at), "value");
    std::string member;
    if (!absl::Base64Unescape(value, &member) || member.find(place(node).name) == std::string::npos) continue;
    AskEtcd("/v3/kv/put", absl::StrCat("{\"key\":\"", key, "\",\"value\":\"", value, "\"}"));
    return key;
  }
  return "";
}

void DaemonCluster::RemoveMember(const std::string& key) const {
  AskEtcd("/v3/kv/deleterange", absl::StrCat("{\"key\":\"", key, "\"}"));
}

std::string DaemonCluster::Held(bool all_announced) const {
  std::string held;
  const auto members = std::ranges::count_if(daemons_, [](const auto& daemon) { return daemon->pid() >= 0; });
  int64_t objects = 0;
  for (size_t node = 0; node < daemons_.size(); ++node) {
    if (daemons_[node]->pid() < 0) continue;
    const std::string metrics = daemons_[node]->Metrics();
    objects += static_cast<int64_t>(SumOf(metrics, "ashlar_objects"));
    for (const char* name : kHeld) {
      const double value = SumOf(metrics, name);
      if (value != 0) absl::StrAppend(&held, name, " of node", node, ": ", value, "\n");
    }
    const double readers = SumOf(metrics, "ashlar_peer_readers");
    if (readers >= static_cast<double>(members)) {
      absl::StrAppend(&held, "readers of node", node, ": ", readers, ", and the others are ", members - 1, "\n");
    }
  }
  if (!has_etcd_) return held;
  const int64_t known = KeysInEtcd('m'), entries = KeysInEtcd('e');
  if (known != members) absl::StrAppend(&held, "members in etcd: ", known, " of ", members, "\n");
  const bool fits = all_announced ? entries == objects : entries >= 0 && entries <= objects;
  if (!fits) absl::StrAppend(&held, "entries in etcd: ", entries, " of ", objects, " objects\n");
  return held;
}

}  // namespace ashlar::nodes
