// SPDX-License-Identifier: Apache-2.0
#include "daemon/config/cluster_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"

namespace ashlar::daemon {
namespace {

constexpr const char* kMinimal =
    "listen: {rpc_socket: /run/a.sock, session_socket: /run/b.sock}\ndram: {capacity_bytes: 4GiB}\n";
constexpr const char* kLeastCluster =
    "cluster: {node: a-1, control_address: \"a:7001\", transport_address: \"a:7002\", etcd: {endpoints: "
    "[\"e:2379\"]}, tls: {insecure: true}}\n";

TEST(ClusterConfig, FillsAClustersDefaults) {
  v1::Config config;
  const absl::Status status = ParseConfig(absl::StrCat(kMinimal, kLeastCluster), &config);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(config.cluster().name(), "default");
  EXPECT_EQ(config.cluster().listen_address(), "a:7001");
  EXPECT_EQ(config.cluster().peer_timeout_seconds(), 10u);
  EXPECT_EQ(config.cluster().expect_transport(), "any");
  EXPECT_EQ(config.cluster().rdma_reads(), "auto");
  EXPECT_EQ(config.cluster().announce(), "second_use");
  EXPECT_EQ(config.cluster().lookup_milliseconds(), 100u);
  EXPECT_EQ(config.cluster().tls().reload_seconds(), 10u);
  const v1::Etcd& etcd = config.cluster().etcd();
  EXPECT_EQ(etcd.prefix(), "/ashlar");
  EXPECT_EQ(etcd.lease_seconds(), 15u);
  EXPECT_EQ(etcd.writes_per_second(), 1000u);
  EXPECT_EQ(etcd.cluster_writes_per_second(), 20000u);
  EXPECT_EQ(etcd.queued_writes(), 65536u);
  EXPECT_EQ(etcd.mirror_entries(), 4194304u);
}

TEST(ClusterConfig, ReadsEveryField) {
  v1::Config config;
  const absl::Status status = ParseConfig(absl::StrCat(kMinimal, R"(
tenants: [{name: blue, uids: [1000], dram_bytes: 1GiB}]
cluster: {node: n.1, name: east, listen_address: "0.0.0.0:7003", peer_timeout_seconds: 4,
          tls: {ca_file: /ca, cert_file: /c, key_file: /k, spiffe_prefix: "spiffe://a/b/", reload_seconds: 3},
          expect_transport: rdma, rdma_reads: off, announce: all, lookup_milliseconds: 7,
          peers: [{node: n.2, tenants: [blue]}, {node: "*"}], control_address: "10.0.0.1:7001", transport_address: "10.0.0.1:7002",
          etcd: {endpoints: ["e1:2379", "[::1]:2379"], ca_file: /ca, cert_file: /cert, key_file: /key, user: ashlar,
                 password_file: /password, prefix: /a/b, lease_seconds: 5, writes_per_second: 7,
                 cluster_writes_per_second: 70, queued_writes: 9, mirror_entries: 11}}
)"),
                                          &config);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(config.cluster().node(), "n.1");
  EXPECT_EQ(config.cluster().name(), "east");
  EXPECT_EQ(config.cluster().transport_address(), "10.0.0.1:7002");
  EXPECT_EQ(config.cluster().listen_address(), "0.0.0.0:7003");
  EXPECT_EQ(config.cluster().peer_timeout_seconds(), 4u);
  EXPECT_EQ(config.cluster().tls().spiffe_prefix(), "spiffe://a/b/");
  EXPECT_EQ(config.cluster().tls().reload_seconds(), 3u);
  EXPECT_EQ(config.cluster().peers(1).node(), "*");
  EXPECT_EQ(config.cluster().etcd().endpoints(1), "[::1]:2379");
  EXPECT_EQ(config.cluster().etcd().key_file(), "/key");
  EXPECT_EQ(config.cluster().etcd().user(), "ashlar");
  EXPECT_EQ(config.cluster().etcd().prefix(), "/a/b");
  EXPECT_EQ(config.cluster().etcd().lease_seconds(), 5u);
  EXPECT_EQ(config.cluster().etcd().cluster_writes_per_second(), 70u);
  EXPECT_EQ(config.cluster().etcd().mirror_entries(), 11u);
  EXPECT_EQ(config.cluster().expect_transport(), "rdma");
  EXPECT_EQ(config.cluster().rdma_reads(), "off");
  EXPECT_EQ(config.cluster().announce(), "all");
  EXPECT_EQ(config.cluster().lookup_milliseconds(), 7u);
}

TEST(ClusterConfig, AClustersFieldsAreChecked) {
  const std::string head = "cluster: {node: a, control_address: \"a:1\", transport_address: \"a:2\", ";
  const std::string etcd = head + "etcd: {endpoints: [\"e:1\"], ";
  const struct {
    std::string yaml, error;
  } kCases[] = {
      {"cluster: {}", "cluster.node: required"},
      {"cluster: {node: a b}", "cluster.node: invalid character"},
      {"cluster: {node: a, name: " + std::string(65, 'x') + "}", "cluster.name: too long; expected at most 64 bytes"},
      {"cluster: {node: a}", "cluster.control_address: required"},
      {"cluster: {node: a, control_address: a}", "cluster.control_address: expected host:port"},
      {"cluster: {node: a, control_address: \"a:0\"}", "cluster.control_address: port 0"},
      {"cluster: {node: a, control_address: \"a:1\"}", "cluster.transport_address: required"},
      {"cluster: {node: a, control_address: \"a:1\", transport_address: \"a:1\"}",
       "cluster.transport_address: same as"},
      {head + "expect_transport: ib}", "cluster.expect_transport: \"ib\"; expected any or rdma"},
      {head + "rdma_reads: on}", "cluster.rdma_reads: \"on\"; expected auto or off"},
      {head + "announce: used_twice}", "cluster.announce: used_twice is renamed; use second_use"},
      {head + "announce: some}", "cluster.announce: \"some\"; expected second_use or all"},
      {head + "lookup_milliseconds: 60001}", "cluster.lookup_milliseconds: out of range"},
      {head + "}", "cluster.etcd.endpoints: required"},
      {head + "etcd: {endpoints: [\"e:1\", e]}}", "cluster.etcd.endpoints[1]: expected host:port"},
      {etcd + "cert_file: /c, ca_file: /a}}", "cluster.etcd.key_file: required with cert_file"},
      {etcd + "key_file: /k, ca_file: /a}}", "cluster.etcd.cert_file: required with key_file"},
      {etcd + "cert_file: /c, key_file: /k}}", "cluster.etcd.ca_file: required with cert_file"},
      {etcd + "user: u}}", "cluster.etcd.password_file: required with user"},
      {etcd + "password_file: /p}}", "cluster.etcd.user: required with password_file"},
      {etcd + "prefix: a}}", "cluster.etcd.prefix: must begin"},
      {etcd + "prefix: /" + std::string(128, 'x') + "}}", "cluster.etcd.prefix: too long; expected at most 128 bytes"},
      {etcd + "lease_seconds: 1}}", "cluster.etcd.lease_seconds: out of range"},
      {etcd + "lease_seconds: 3601}}", "cluster.etcd.lease_seconds: out of range"},
      {etcd + "writes_per_second: 1000001}}", "cluster.etcd.writes_per_second: out of range"},
      {etcd + "cluster_writes_per_second: 1000001}}", "cluster.etcd.cluster_writes_per_second: out of range"},
      {etcd + "queued_writes: 5000000}}", "cluster.etcd.queued_writes: out of range"},
      {etcd + "mirror_entries: 300000000}}", "cluster.etcd.mirror_entries: out of range"},
  };
  for (const auto& c : kCases) {
    v1::Config config;
    const absl::Status status = ParseConfig(kMinimal + c.yaml, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.yaml;
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith(c.error)) << c.yaml;
  }
}

TEST(ClusterConfig, ChecksPeers) {
  const std::string head =
      "cluster: {node: a, control_address: \"a:1\", transport_address: \"a:2\", etcd: {endpoints: [\"e:1\"]}, ";
  const std::string open = head + "tls: {insecure: true}, ";
  const std::string files = head + "tls: {ca_file: /a, cert_file: /c, key_file: /k, ";
  const struct {
    std::string yaml, error;
  } kCases[] = {
      {head + "}", "cluster.tls.ca_file: required"},
      {head + "tls: {ca_file: /a}}", "cluster.tls.cert_file: required"},
      {head + "tls: {ca_file: /a, cert_file: /c}}", "cluster.tls.key_file: required"},
      {files + "insecure: true}}", "cluster.tls.ca_file: cannot be set together with cluster.tls.insecure"},
      {head + "tls: {insecure: true, spiffe_prefix: \"spiffe://a/\"}}",
       "cluster.tls.spiffe_prefix: cannot be set together with"},
      {files + "spiffe_prefix: \"spiffe://a\"}}", "cluster.tls.spiffe_prefix: expected"},
      {files + "spiffe_prefix: \"http://a/\"}}", "cluster.tls.spiffe_prefix: expected"},
      {files + "reload_seconds: 3601}}", "cluster.tls.reload_seconds: out of range"},
      {open + "listen_address: a}", "cluster.listen_address: expected host:port"},
      {open + "peer_timeout_seconds: 1}", "cluster.peer_timeout_seconds: out of range"},
      {open + "replicate: cold}", "cluster.replicate: \"cold\"; expected hot or never"},
      {open + "replica_bytes: 2048TiB}", "cluster.replica_bytes: out of range"},
      {open + "transport_allow: [10.0.0.1, a]}", "cluster.transport_allow[1]: \"a\"; expected an IPv4 address"},
      {open + "peers: [{}]}", "cluster.peers[0].node: required"},
      {open + "peers: [{node: b}, {node: b}]}", "cluster.peers[1].node: \"b\" is given twice"},
      {open + "peers: [{node: \"*\", tenants: [other]}]}", "cluster.peers[0].tenants[0]: tenant \"other\""},
  };
  for (const auto& c : kCases) {
    v1::Config config;
    const absl::Status status = ParseConfig(kMinimal + c.yaml, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.yaml;
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith(c.error)) << c.yaml;
  }
}

}  // namespace
}  // namespace ashlar::daemon
