// SPDX-License-Identifier: Apache-2.0
#include "daemon/config/cluster_config.h"

#include <arpa/inet.h>

#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/peer/directory/options.h"
#include "daemon/runtime/host_port.h"
#include "proto/invalid.h"

namespace ashlar::daemon {
namespace {

constexpr size_t kMaxName = 64;  // for names of tenants, nodes and clusters
constexpr size_t kMaxEtcdPrefix = 128;
constexpr uint32_t kMinLeaseSeconds = 2, kMaxLeaseSeconds = 3600;  // etcd's own minimum, and ours
constexpr uint32_t kMaxWrites = 1000000;
constexpr uint32_t kMaxQueuedWrites = 1 << 22;
constexpr uint64_t kMaxMirrorEntries = uint64_t{1} << 28;
constexpr uint32_t kMaxReloadSeconds = 3600;
constexpr uint32_t kMaxLookupMilliseconds = 60000;
constexpr int kMaxAllowed = 1000;                         // limited by the kernel's packet filter
constexpr uint64_t kMaxReplicaBytes = uint64_t{1} << 40;  // bytes per second
constexpr uint32_t kMinPeerTimeoutSeconds = 2, kMaxPeerTimeoutSeconds = 600;

absl::Status CheckAddress(absl::string_view field, const std::string& address) {
  if (address.empty()) return Invalid(field, ": required");
  const auto parsed = ParseHostPort(address);
  if (!parsed.ok()) return Invalid(field, ": ", parsed.status().message());
  return parsed->port > 0 ? absl::OkStatus() : Invalid(field, ": port 0 is not reachable; expected 1 to 65535");
}

absl::Status CheckEtcd(const v1::Etcd& etcd) {
  if (etcd.endpoints().empty()) return Invalid("cluster.etcd.endpoints: required");
  for (int i = 0; i < etcd.endpoints_size(); ++i) {
    const std::string field = absl::StrCat("cluster.etcd.endpoints[", i, "]");
    if (absl::Status status = CheckAddress(field, etcd.endpoints(i)); !status.ok()) return status;
  }
  if (etcd.cert_file().empty() != etcd.key_file().empty()) {
    return Invalid("cluster.etcd.", etcd.key_file().empty() ? "key_file" : "cert_file", ": required with ",
                   etcd.key_file().empty() ? "cert_file" : "key_file");
  }
  if (!etcd.cert_file().empty() && etcd.ca_file().empty()) {
    return Invalid("cluster.etcd.ca_file: required with cert_file");
  }
  if (etcd.user().empty() != etcd.password_file().empty()) {
    return Invalid("cluster.etcd.", etcd.user().empty() ? "user" : "password_file", ": required with ",
                   etcd.user().empty() ? "password_file" : "user");
  }
  if (etcd.prefix()[0] != '/') return Invalid("cluster.etcd.prefix: must begin with '/'");
  if (etcd.prefix().size() > kMaxEtcdPrefix) {
    return Invalid("cluster.etcd.prefix: too long; expected at most ", kMaxEtcdPrefix, " bytes");
  }
  if (etcd.lease_seconds() < kMinLeaseSeconds || etcd.lease_seconds() > kMaxLeaseSeconds) {
    return Invalid("cluster.etcd.lease_seconds: out of range; expected ", kMinLeaseSeconds, " to ", kMaxLeaseSeconds);
  }
  if (etcd.writes_per_second() > kMaxWrites)
    return Invalid("cluster.etcd.writes_per_second: out of range; expected at most ", kMaxWrites);
  if (etcd.cluster_writes_per_second() > kMaxWrites) {
    return Invalid("cluster.etcd.cluster_writes_per_second: out of range; expected at most ", kMaxWrites);
  }
  if (etcd.queued_writes() > kMaxQueuedWrites)
    return Invalid("cluster.etcd.queued_writes: out of range; expected at most ", kMaxQueuedWrites);
  if (etcd.mirror_entries() > kMaxMirrorEntries)
    return Invalid("cluster.etcd.mirror_entries: out of range; expected at most ", kMaxMirrorEntries);
  return absl::OkStatus();
}

absl::Status CheckTls(const v1::PeerTls& tls) {
  const struct {
    absl::string_view field;
    const std::string& path;
  } files[] = {{"ca_file", tls.ca_file()}, {"cert_file", tls.cert_file()}, {"key_file", tls.key_file()}};
  for (const auto& [field, path] : files) {
    if (tls.insecure() && !path.empty())
      return Invalid("cluster.tls.", field, ": cannot be set together with cluster.tls.insecure");
    if (!tls.insecure() && path.empty()) return Invalid("cluster.tls.", field, ": required");
  }
  const std::string& prefix = tls.spiffe_prefix();
  if (tls.insecure() && !prefix.empty())
    return Invalid("cluster.tls.spiffe_prefix: cannot be set together with cluster.tls.insecure");
  if (!prefix.empty() && (!absl::StartsWith(prefix, "spiffe://") || !absl::EndsWith(prefix, "/"))) {
    return Invalid("cluster.tls.spiffe_prefix: expected spiffe://TRUST-DOMAIN/PATH/, with '/' at the end");
  }
  if (tls.reload_seconds() > kMaxReloadSeconds)
    return Invalid("cluster.tls.reload_seconds: out of range; expected at most ", kMaxReloadSeconds);
  return absl::OkStatus();
}

}  // namespace

void FillClusterDefaults(v1::Cluster* cluster) {
  if (cluster->listen_address().empty()) cluster->set_listen_address(cluster->control_address());
  if (cluster->peer_timeout_seconds() == 0) cluster->set_peer_timeout_seconds(10);
  if (cluster->expect_transport().empty()) cluster->set_expect_transport("any");
  if (cluster->rdma_reads().empty()) cluster->set_rdma_reads("auto");
  if (cluster->announce().empty()) cluster->set_announce("second_use");
  if (cluster->replicate().empty()) cluster->set_replicate("hot");
  if (cluster->replica_bytes() == 0) cluster->set_replica_bytes(uint64_t{64} << 20);
  if (cluster->lookup_milliseconds() == 0) cluster->set_lookup_milliseconds(100);
  v1::PeerTls* tls = cluster->mutable_tls();
  if (tls->reload_seconds() == 0) tls->set_reload_seconds(10);
  const EtcdDirectoryOptions defaults;
  if (cluster->name().empty()) cluster->set_name(defaults.cluster);
  v1::Etcd* etcd = cluster->mutable_etcd();
  if (etcd->prefix().empty()) etcd->set_prefix(defaults.prefix);
  if (etcd->lease_seconds() == 0) etcd->set_lease_seconds(defaults.lease_seconds);
  if (etcd->writes_per_second() == 0) etcd->set_writes_per_second(defaults.writes_per_second);
  if (etcd->cluster_writes_per_second() == 0) etcd->set_cluster_writes_per_second(defaults.cluster_writes_per_second);
  if (etcd->queued_writes() == 0) etcd->set_queued_writes(defaults.queued_writes);
  if (etcd->mirror_entries() == 0) etcd->set_mirror_entries(defaults.mirror_entries);
}

absl::Status CheckName(absl::string_view field, const std::string& name) {
  if (name.empty()) return Invalid(field, ": required");
  if (name.size() > kMaxName) return Invalid(field, ": too long; expected at most ", kMaxName, " bytes");
  for (char c : name) {
    if (!absl::ascii_isalnum(c) && c != '.' && c != '_' && c != '-') {
      return Invalid(field, ": invalid character; expected letters, digits, '.', '_' and '-'");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckCluster(const v1::Cluster& cluster) {
  if (absl::Status status = CheckName("cluster.node", cluster.node()); !status.ok()) return status;
  if (absl::Status status = CheckName("cluster.name", cluster.name()); !status.ok()) return status;
  if (absl::Status status = CheckAddress("cluster.control_address", cluster.control_address()); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckAddress("cluster.transport_address", cluster.transport_address()); !status.ok()) {
    return status;
  }
  if (cluster.control_address() == cluster.transport_address()) {
    return Invalid("cluster.transport_address: same as cluster.control_address");
  }
  if (cluster.expect_transport() != "any" && cluster.expect_transport() != "rdma") {
    return Invalid("cluster.expect_transport: \"", cluster.expect_transport(), "\"; expected any or rdma");
  }
  if (cluster.rdma_reads() != "auto" && cluster.rdma_reads() != "off") {
    return Invalid("cluster.rdma_reads: \"", cluster.rdma_reads(), "\"; expected auto or off");
  }
  if (cluster.announce() == "used_twice") return Invalid("cluster.announce: used_twice is renamed; use second_use");
  if (cluster.announce() != "second_use" && cluster.announce() != "all") {
    return Invalid("cluster.announce: \"", cluster.announce(), "\"; expected second_use or all");
  }
  if (cluster.transport_allow_size() > kMaxAllowed) {
    return Invalid("cluster.transport_allow: too many; expected at most ", kMaxAllowed, " addresses");
  }
  for (int i = 0; i < cluster.transport_allow_size(); ++i) {
    in_addr parsed{};
    if (inet_pton(AF_INET, cluster.transport_allow(i).c_str(), &parsed) == 1) continue;
    return Invalid("cluster.transport_allow[", i, "]: \"", cluster.transport_allow(i), "\"; expected an IPv4 address");
  }
  if (cluster.replicate() != "hot" && cluster.replicate() != "never") {
    return Invalid("cluster.replicate: \"", cluster.replicate(), "\"; expected hot or never");
  }
  if (cluster.replica_bytes() > kMaxReplicaBytes) {
    return Invalid("cluster.replica_bytes: out of range; expected at most ", kMaxReplicaBytes);
  }
  if (cluster.lookup_milliseconds() > kMaxLookupMilliseconds) {
    return Invalid("cluster.lookup_milliseconds: out of range; expected at most ", kMaxLookupMilliseconds);
  }
  return CheckEtcd(cluster.etcd());
}

absl::Status CheckPeers(const v1::Config& config) {
  const v1::Cluster& cluster = config.cluster();
  if (absl::Status status = CheckAddress("cluster.listen_address", cluster.listen_address()); !status.ok()) {
    return status;
  }
  if (cluster.peer_timeout_seconds() < kMinPeerTimeoutSeconds ||
      cluster.peer_timeout_seconds() > kMaxPeerTimeoutSeconds) {
    return Invalid("cluster.peer_timeout_seconds: out of range; expected ", kMinPeerTimeoutSeconds, " to ",
                   kMaxPeerTimeoutSeconds);
  }
  if (absl::Status status = CheckTls(cluster.tls()); !status.ok()) return status;
  std::set<std::string> nodes, tenants;
  for (const v1::Tenant& tenant : config.tenants()) tenants.insert(tenant.name());
  for (int i = 0; i < cluster.peers_size(); ++i) {
    const v1::ClusterPeer& peer = cluster.peers(i);
    const std::string field = absl::StrCat("cluster.peers[", i, "]");
    if (peer.node() != "*") {
      if (absl::Status status = CheckName(absl::StrCat(field, ".node"), peer.node()); !status.ok()) return status;
    }
    if (!nodes.insert(peer.node()).second) return Invalid(field, ".node: \"", peer.node(), "\" is given twice");
    for (int j = 0; j < peer.tenants_size(); ++j) {
      if (!tenants.contains(peer.tenants(j))) {
        return Invalid(field, ".tenants[", j, "]: tenant \"", peer.tenants(j), "\" is not in tenants");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ashlar::daemon
