// SPDX-License-Identifier: Apache-2.0
#include "daemon/config/config.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "google/protobuf/util/message_differencer.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;

constexpr const char* kListen = "listen: {rpc_socket: /run/a.sock, session_socket: /run/b.sock}\n";
constexpr const char* kDram = "dram: {capacity_bytes: 4GiB}\n";

std::string Minimal() {
  return absl::StrCat(kListen, kDram);
}

TEST(Config, FillsDocumentedDefaults) {
  v1::Config config;
  ASSERT_TRUE(ParseConfig(Minimal(), &config).ok());
  EXPECT_EQ(config.dram().capacity_bytes(), uint64_t{4} << 30);
  EXPECT_EQ(config.dram().arena_bytes(), uint64_t{64} << 20);
  EXPECT_FALSE(config.dram().huge_pages());
  EXPECT_FALSE(config.dram().lock());
  EXPECT_EQ(config.dram().numa().policy(), "");
  ASSERT_EQ(config.tenants_size(), 1);
  EXPECT_EQ(config.tenants(0).name(), "default");
  ASSERT_EQ(config.tenants(0).uids_size(), 1);
  EXPECT_EQ(config.tenants(0).uids(0), geteuid());
  EXPECT_EQ(config.tenants(0).dram_bytes(), config.dram().capacity_bytes());
  EXPECT_EQ(config.tenants(0).region_bytes(), uint64_t{512} << 30);
  EXPECT_EQ(config.tenants(0).max_sessions(), 256u);
  EXPECT_EQ(config.tenants(0).max_regions(), 16u * 256);
  EXPECT_EQ(config.tenants(0).model_bytes(), 256u << 20);
  EXPECT_EQ(config.sessions().max_regions(), 64u);
  EXPECT_EQ(config.prefill().patience(), 4u);
  EXPECT_EQ(config.prefill().min_patience_milliseconds(), 2000u);
  EXPECT_EQ(config.prefill().tries(), 3u);
  EXPECT_EQ(config.prefill().segments_per_node(), 24u);
  EXPECT_EQ(config.leases().unused_seconds(), 60u);
  EXPECT_EQ(config.drain_seconds(), 10u);
  EXPECT_EQ(config.leases().reservation_seconds(), 60u);
  EXPECT_EQ(config.leases().max_leases(), 131072u);
  EXPECT_EQ(config.leases().max_segments(), 4194304u);
  EXPECT_EQ(config.tenants(0).max_leases(), 131072u);
  EXPECT_EQ(config.tenants(0).max_leased_segments(), 4194304u);
  EXPECT_EQ(config.sessions().max_sessions(), 256u);
  EXPECT_EQ(config.sessions().region_bytes(), uint64_t{64} << 30);
  EXPECT_GE(config.workers().threads(), 1u);
  EXPECT_EQ(config.workers().queue_depth(), 1024u);
  EXPECT_EQ(config.workers().landings_per_session(), 256u);
  EXPECT_EQ(config.tenants(0).max_landings(), 1024u);
  EXPECT_EQ(config.tenants(0).landing_bytes(), 512u << 20);
  EXPECT_EQ(config.log().level(), "info");
  EXPECT_EQ(config.log().format(), "text");
  EXPECT_EQ(config.listen().metrics_address(), "");
  EXPECT_EQ(config.listen().metrics_socket(), "");
  EXPECT_EQ(config.listen().metrics_socket_access(), "owner");
  EXPECT_EQ(config.metrics().tenants(), "summed");
  EXPECT_EQ(config.listen().admin_socket(), "");
  EXPECT_TRUE(config.hbm().empty());
  EXPECT_EQ(config.ssd().folder(), "");
  EXPECT_EQ(config.ssd().admission(), "second_use");
  EXPECT_EQ(config.ssd().on_damage(), "quarantine");
  EXPECT_EQ(config.eviction(), "price");
  EXPECT_EQ(config.ssd().threads(), 8u);
  EXPECT_EQ(config.ssd().queue_depth(), 256u);
  EXPECT_EQ(config.tenants(0).ttl_seconds(), 0u);
  EXPECT_FALSE(config.has_cluster());
}

constexpr const char* kCluster =
    "cluster: {node: a-1, control_address: \"a:7001\", transport_address: \"a:7002\", etcd: {endpoints: "
    "[\"e:2379\"]}, tls: {insecure: true}}\n";

TEST(Config, ASingleTenantHasTheWholeOfEveryTier) {
  v1::Config config;
  ASSERT_TRUE(
      ParseConfig(Minimal() + "hbm: {capacity_bytes: 1MiB}\nssd: {folder: /d, capacity_bytes: 9GiB}\n", &config).ok());
  EXPECT_EQ(config.tenants(0).hbm_bytes(), 1u << 20);
  EXPECT_EQ(config.tenants(0).ssd_bytes(), uint64_t{9} << 30);
  EXPECT_EQ(config.hbm(0).arena_bytes(), 1u << 20) << "no more than there is";
}

TEST(Config, ReadsEveryField) {
  v1::Config config;
  const absl::Status status = ParseConfig(R"(
listen:
  rpc_socket: /run/ashlar/rpc.sock
  session_socket: "/run/ashlar/session.sock"
  metrics_address: 127.0.0.1:9464
  admin_socket: /run/ashlar/admin.sock
  metrics_socket: /run/ashlar/metrics.sock
  metrics_socket_access: group
metrics: {tenants: named}
dram: {capacity_bytes: 1073741824, arena_bytes: 512KiB, huge_pages: true, lock: true,
       numa: {policy: interleave, nodes: [0, 2]}}
tenants:
  - {name: blue, uids: [1000, 1001], dram_bytes: 512MiB, region_bytes: 3GiB, max_sessions: 2, hbm_bytes: 1MiB,
     ssd_bytes: 7GiB, ttl_seconds: 60, public_floor: {dram_bytes: 1MiB, ssd_bytes: 4GiB},
     private_floor: {hbm_bytes: 1MiB, ssd_bytes: 3GiB}, prefix_bytes: 2GiB, max_landings: 7, landing_bytes: 64MiB,
     max_leases: 100, max_leased_segments: 200, max_regions: 11, model_bytes: 3MiB,
     calls_per_second: 500, bytes_per_second: 2GiB}
  - {name: green-2, uids: [1002], dram_bytes: 512 MiB, hbm_bytes: 1MiB}
hbm: {capacity_bytes: 2MiB, arena_bytes: 1MiB}
ssd: {folder: /d, capacity_bytes: 8GiB, admission: tinylfu, threads: 3, queue_depth: 5, on_damage: refuse}
leases: {unused_seconds: 5, reservation_seconds: 7, max_leases: 1000, max_segments: 2000}
sessions: {max_sessions: 3, region_bytes: 1TiB, max_regions: 7}
workers: {threads: 2, queue_depth: 9, landings_per_session: 3}
log: {level: warning, format: json}
)",
                                          &config);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(config.listen().metrics_socket(), "/run/ashlar/metrics.sock");
  EXPECT_EQ(config.listen().metrics_socket_access(), "group");
  EXPECT_EQ(config.metrics().tenants(), "named");
  EXPECT_EQ(config.dram().arena_bytes(), 512u << 10);
  EXPECT_TRUE(config.dram().huge_pages());
  EXPECT_TRUE(config.dram().lock());
  EXPECT_EQ(config.dram().numa().policy(), "interleave");
  EXPECT_EQ(config.dram().numa().nodes(1), 2u);
  EXPECT_EQ(config.tenants(0).uids(1), 1001u);
  EXPECT_EQ(config.tenants(0).region_bytes(), uint64_t{3} << 30);
  EXPECT_EQ(config.tenants(1).region_bytes(), uint64_t{8} << 40);
  EXPECT_EQ(config.tenants(0).max_sessions(), 2u);
  EXPECT_EQ(config.tenants(1).max_sessions(), 1u) << "half of three";
  EXPECT_EQ(config.tenants(0).max_regions(), 11u);
  EXPECT_EQ(config.tenants(1).max_regions(), 16u);
  EXPECT_EQ(config.tenants(0).model_bytes(), 3u << 20);
  EXPECT_EQ(config.sessions().max_regions(), 7u);
  EXPECT_EQ(config.tenants(1).name(), "green-2");
  EXPECT_EQ(config.tenants(1).dram_bytes(), 512u << 20);
  EXPECT_EQ(config.leases().reservation_seconds(), 7u);
  EXPECT_EQ(config.tenants(0).max_leases(), 100u);
  EXPECT_EQ(config.tenants(0).max_leased_segments(), 200u);
  EXPECT_EQ(config.tenants(1).max_leases(), 1000u);
  EXPECT_EQ(config.tenants(1).max_leased_segments(), 2000u);
  EXPECT_EQ(config.sessions().region_bytes(), uint64_t{1} << 40);
  EXPECT_EQ(config.workers().queue_depth(), 9u);
  EXPECT_EQ(config.workers().landings_per_session(), 3u);
  EXPECT_EQ(config.tenants(0).max_landings(), 7u);
  EXPECT_EQ(config.tenants(0).landing_bytes(), 64u << 20);
  EXPECT_EQ(config.tenants(1).max_landings(), 4u) << "its share of the queue";
  EXPECT_EQ(config.tenants(0).calls_per_second(), 500u);
  EXPECT_EQ(config.tenants(0).bytes_per_second(), uint64_t{2} << 30);
  EXPECT_EQ(config.tenants(1).calls_per_second(), 0u) << "any number";
  EXPECT_EQ(config.log().format(), "json");
  EXPECT_EQ(config.hbm(0).arena_bytes(), 1u << 20);
  EXPECT_EQ(config.ssd().admission(), "tinylfu");
  EXPECT_EQ(config.ssd().queue_depth(), 5u);
  EXPECT_EQ(config.ssd().on_damage(), "refuse");
  EXPECT_EQ(config.tenants(0).public_floor().ssd_bytes(), uint64_t{4} << 30);
  EXPECT_EQ(config.tenants(0).private_floor().hbm_bytes(), 1u << 20);
  EXPECT_EQ(config.tenants(0).ttl_seconds(), 60u);
  EXPECT_EQ(config.tenants(0).prefix_bytes(), uint64_t{2} << 30);
  EXPECT_EQ(config.tenants(1).prefix_bytes(), 512u << 20) << "as its largest budget";
  EXPECT_EQ(config.tenants(1).ssd_bytes(), 0u);
}

TEST(Config, FormattedConfigParsesBack) {
  for (const std::string& more : {std::string(), std::string("gpu: {}\n"), std::string("gpu: [{device: 2}, {}]\n"),
                                  absl::StrCat("gpu: {}\n", kCluster)}) {
    v1::Config config, again;
    ASSERT_TRUE(ParseConfig(Minimal() + more, &config).ok());
    ASSERT_TRUE(ParseConfig(FormatConfig(config), &again).ok()) << FormatConfig(config);
    EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(config, again)) << FormatConfig(config);
  }
}

struct BadInput {
  const char* yaml;   // after the listening sockets
  const char* error;  // the beginning of the message
};
void PrintTo(const BadInput& input, std::ostream* out) {
  *out << input.error;
}

class BadConfig : public ::testing::TestWithParam<BadInput> {};

TEST_P(BadConfig, IsRefusedWithFieldName) {
  v1::Config config;
  const absl::Status status = ParseConfig(absl::StrCat(kListen, GetParam().yaml), &config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::StartsWith(GetParam().error));
}

INSTANTIATE_TEST_SUITE_P(
    Fields, BadConfig,
    ::testing::Values(
        BadInput{"dram: {capacty_bytes: 4GiB}", "dram.capacty_bytes: unknown field"},
        BadInput{"prefill: {segments_of_a_node: 4}", "prefill.segments_of_a_node: renamed; use segments_per_node"},
        BadInput{"drum: {}", "drum: unknown field"}, BadInput{"dram: 7", "dram: expected a map of fields"},
        BadInput{"dram:", "dram: has no value"}, BadInput{"dram: [1]", "dram: expected a map of fields"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ndram: {capacity_bytes: 1GiB}", "dram: given twice"},
        BadInput{"dram: {capacity_bytes: lots}", "dram.capacity_bytes: \"lots\" is not a size; expected a size like"},
        BadInput{"dram: {capacity_bytes: 1.5.5GiB}", "dram.capacity_bytes: \"1.5.5GiB\" is not a size"},
        BadInput{"dram: {capacity_bytes: 4GX}", "dram.capacity_bytes: \"4GX\" is not a size"},
        BadInput{"dram: {capacity_bytes: GiB}", "dram.capacity_bytes: \"GiB\" is not a size"},
        BadInput{"dram: {capacity_bytes: \"4GiB\"}", "dram.capacity_bytes: expected a whole number"},
        BadInput{"log: {audit_file: \xff\xff/a}", "log.audit_file: not valid UTF-8"},
        BadInput{"dram: {capacity_bytes: [4GiB]}", "dram.capacity_bytes: expected a single value"},
        BadInput{"dram: {capacity_bytes: -1}", "dram.capacity_bytes: \"-1\" is not a size"},
        BadInput{"dram: {capacity_bytes: 99999999TiB}", "dram.capacity_bytes: \"99999999TiB\" is out of range"},
        BadInput{"dram: {capacity_bytes: 18446744073709551616}",
                 "dram.capacity_bytes: \"18446744073709551616\" is out"},
        BadInput{"dram: {capacity_bytes: 2048TiB}", "dram.capacity_bytes: out of range"},
        BadInput{"dram: {capacity_bytes: 4GiB, huge_pages: yes}", "dram.huge_pages: expected true or false"},
        BadInput{"dram: {capacity_bytes: 4GiB, huge_pages: \"true\"}", "dram.huge_pages: expected true or false"},
        BadInput{"dram: {capacity_bytes: 4GiB, arena_bytes: 1000000}",
                 "dram.arena_bytes: 1000000; expected a multiple"},
        BadInput{"dram: {capacity_bytes: 4MiB}",
                 "dram.arena_bytes: 67108864; expected at most dram.capacity_bytes, 4194304"},
        BadInput{"dram: {capacity_bytes: 1GiB, lock: 1}", "dram.lock: expected true or false"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ngpu: {device: 1024}", "gpu.device: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB, numa: {nodes: [0]}}",
                 "dram.numa.policy: \"\"; expected bind, preferred or"},
        BadInput{"dram: {capacity_bytes: 1GiB, numa: {policy: local, nodes: [0]}}",
                 "dram.numa.policy: \"local\"; expected bind"},
        BadInput{"dram: {capacity_bytes: 1GiB, numa: {policy: bind}}", "dram.numa.nodes: required"},
        BadInput{"dram: {capacity_bytes: 1GiB, numa: {policy: preferred, nodes: [0, 1]}}",
                 "dram.numa.nodes: 2 nodes; expected one with policy preferred"},
        BadInput{"dram: {capacity_bytes: 1GiB, numa: {policy: bind, nodes: [0, 1024]}}",
                 "dram.numa.nodes[1]: 1024; expected less than 1024"},
        BadInput{"dram: {capacity_bytes: 1GiB, numa: {policy: interleave, nodes: [1, 0, 1]}}",
                 "dram.numa.nodes[2]: given twice"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nhbm: {capacity_bytes: 2048TiB}", "hbm.capacity_bytes: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nhbm: {capacity_bytes: 1MiB, arena_bytes: 2MiB}",
                 "hbm.arena_bytes: 2097152; expected at most hbm.capacity_bytes, 1048576"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nssd: {capacity_bytes: 1GiB}", "ssd.folder: required"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nssd: {folder: /d}",
                 "ssd.capacity_bytes: 0; expected at least one extent"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nssd: {folder: /d, capacity_bytes: 1GiB, admission: some}",
                 "ssd.admission: \"some\"; expected"},
        BadInput{"dram: {capacity_bytes: 1GiB}\neviction: fifo", "eviction: \"fifo\"; expected price or lru"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nssd: {folder: /d, capacity_bytes: 1GiB, threads: 9999}",
                 "ssd.threads: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nssd: {folder: /d, capacity_bytes: 1GiB, on_damage: repair}",
                 "ssd.on_damage: \"repair\"; expected"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nssd: {folder: /d, capacity_bytes: 1GiB, on_damage: set_aside}",
                 "ssd.on_damage: set_aside is renamed; use quarantine"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nssd: {folder: /d, capacity_bytes: 1GiB, queue_depth: 9999999}",
                 "ssd.queue_depth: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nssd: {folder: /d, capacity_bytes: 1GiB, queue_depth: 1}",
                 "ssd.queue_depth: 1 is too small; expected at least 2"},
        BadInput{"", "dram.capacity_bytes: required"}));

INSTANTIATE_TEST_SUITE_P(
    Relations, BadConfig,
    ::testing::Values(
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: {name: a}", "tenants: expected a list"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{uids: [1], dram_bytes: 1GiB}]", "tenants[0].name: required"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a b, uids: [1], dram_bytes: 1GiB}]",
                 "tenants[0].name: invalid character"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, dram_bytes: 1GiB}]", "tenants[0].uids: required"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [x], dram_bytes: 1GiB}]",
                 "tenants[0].uids[0]: expected a whole number"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [4294967296], dram_bytes: 1GiB}]",
                 "tenants[0].uids[0]: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1, 65534], dram_bytes: 1GiB}]",
                 "tenants[0].uids[1]: 65534 is the overflow user"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1]}]", "tenants[0].dram_bytes: required"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 1MiB}]",
                 "tenants[0].dram_bytes: must be at least one arena"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 600MiB}, "
                 "{name: b, uids: [2], dram_bytes: 600MiB}]",
                 "tenants[1].dram_bytes: the tenants' budgets together exceed"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 64MiB}, "
                 "{name: b, uids: [2, 1], dram_bytes: 64MiB}]",
                 "tenants[1].uids[1]: 1 already belongs to \"a\""},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 64MiB}, "
                 "{name: a, uids: [2], dram_bytes: 64MiB}]",
                 "tenants[1].name: \"a\" is given twice"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 64MiB, ssd_bytes: 1MiB}]",
                 "tenants[0].ssd_bytes: the configuration has no tier"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nhbm: {capacity_bytes: 1GiB}\n"
                 "tenants: [{name: a, uids: [1], dram_bytes: 64MiB}]",
                 "tenants[0].hbm_bytes: required"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 64MiB, "
                 "public_floor: {dram_bytes: 65MiB}}]",
                 "tenants[0].public_floor.dram_bytes: must not exceed tenants[0].dram_bytes"},
        BadInput{
            "dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 64MiB, "
            "public_floor: {dram_bytes: 60MiB}, private_floor: {dram_bytes: 5MiB}}]",
            "tenants[0].private_floor.dram_bytes: public and private floors together exceed tenants[0].dram_bytes"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 64MiB, "
                 "ttl_seconds: 99999999999}]",
                 "tenants[0].ttl_seconds: out of range"},
        BadInput{"dram: {capacity_bytes: 64MiB}\ntenants: [{name: a, uids: [1], dram_bytes: 64MiB, "
                 "prefix_bytes: 2000TiB}]",
                 "tenants[0].prefix_bytes: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ndrain_seconds: 4000000000", "drain_seconds: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ndrain_seconds: -1", "drain_seconds: "},
        BadInput{"dram: {capacity_bytes: 1GiB}\nleases: {max_leases: 99999999}", "leases.max_leases: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nleases: {max_segments: 999999999}",
                 "leases.max_segments: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nleases: {unused_seconds: 99999999999}",
                 "leases.unused_seconds: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nprefill: {patience: 1001}", "prefill.patience: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nprefill: {min_patience_milliseconds: 3600001}",
                 "prefill.min_patience_milliseconds: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nprefill: {tries: 17}", "prefill.tries: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nprefill: {segments_per_node: 49}",
                 "prefill.segments_per_node: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nsessions: {max_sessions: 100000}",
                 "sessions.max_sessions: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nsessions: {region_bytes: 2000000TiB}",
                 "sessions.region_bytes: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nsessions: {max_regions: 20000000}",
                 "sessions.max_regions: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\n"
                 "tenants: [{name: a, uids: [1], dram_bytes: 64MiB, max_regions: 20000000}]",
                 "tenants[0].max_regions: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\n"
                 "tenants: [{name: a, uids: [1], dram_bytes: 64MiB, model_bytes: 2000000TiB}]",
                 "tenants[0].model_bytes: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\n"
                 "tenants: [{name: a, uids: [1], dram_bytes: 64MiB, region_bytes: 9000TiB}]",
                 "tenants[0].region_bytes: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nsessions: {max_sessions: 5}\n"
                 "tenants: [{name: a, uids: [1], dram_bytes: 64MiB, max_sessions: 6}]",
                 "tenants[0].max_sessions: must not exceed sessions.max_sessions"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nworkers: {threads: 5000}", "workers.threads: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nworkers: {queue_depth: 4GiB}",
                 "workers.queue_depth: expected a whole number"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nworkers: {queue_depth: 2000000}", "workers.queue_depth: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nworkers: {landings_per_session: 2000000}",
                 "workers.landings_per_session: out of range"},
        BadInput{
            "dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 1GiB, max_landings: 2000000}]",
            "tenants[0].max_landings: out of range"},
        BadInput{
            "dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 1GiB, max_leases: 99999999}]",
            "tenants[0].max_leases: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 1GiB, landing_bytes: 1MiB}]",
                 "tenants[0].landing_bytes: 1048576; expected at least 33554432 bytes"},
        BadInput{
            "dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 1GiB, landing_bytes: 2000TiB}]",
            "tenants[0].landing_bytes: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nlog: {level: loud}", "log.level: \"loud\"; expected"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nlog: {format: xml}", "log.format: \"xml\"; expected"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nmetrics: {tenants: none}",
                 "metrics.tenants: \"none\"; expected summed or named"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nevents: {zmq_address: \"127.0.0.1:1\"}",
                 "events.zmq_address: expected tcp://HOST:PORT"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nevents: {zmq_replay_address: \"tcp://*:1\"}",
                 "events.zmq_address: required with zmq_replay_address"},
        BadInput{"dram: {capacity_bytes: 1GiB}\nevents: {kept_batches: 2000000}", "events.kept_batches: out of range"},
        BadInput{"dram: {capacity_bytes: 1GiB}\n---\nlog: {}", "config: expected exactly one YAML document"},
        BadInput{"dram: {capacity_bytes: 1GiB", "config: not valid YAML"}));

TEST(Config, ChecksSocketPaths) {
  const struct {
    std::string yaml;
    const char* error;
  } kCases[] = {
      {"", "config: expected exactly one YAML document"},
      {"- 1", "config: expected a map of fields"},
      {"dram: {capacity_bytes: 1GiB}", "listen.rpc_socket: required"},
      {"listen: {rpc_socket: /a}", "listen.session_socket: required"},
      {"listen: {rpc_socket: /a, session_socket: /a}", "listen.session_socket: same as"},
      {absl::StrCat("listen: {rpc_socket: /", std::string(107, 'x'), ", session_socket: /a}"),
       "listen.rpc_socket: too long; expected at most 107 bytes"},
      {"listen: {rpc_socket: /a, session_socket: /b, admin_socket: /b}", "listen.admin_socket: same as"},
      {absl::StrCat("listen: {rpc_socket: /a, session_socket: /b, admin_socket: /", std::string(107, 'x'), "}"),
       "listen.admin_socket: too long; expected at most 107 bytes"},
      {absl::StrCat(kDram, "listen: {rpc_socket: /a, session_socket: /b, metrics_address: localhost}"),
       "listen.metrics_address: expected host:port"},
      {absl::StrCat(kDram, "listen: {rpc_socket: /a, session_socket: /b, metrics_address: \"x:70000\"}"),
       "listen.metrics_address: expected host:port"},
      {absl::StrCat(kDram, "listen: {rpc_socket: /a, session_socket: /b, metrics_address: \"::1:9464\"}"),
       "listen.metrics_address: expected host:port, or [address]:port for IPv6"},
      {absl::StrCat("listen: {rpc_socket: /a, session_socket: /b, metrics_socket: /", std::string(107, 'x'), "}"),
       "listen.metrics_socket: too long; expected at most 107 bytes"},
      {"listen: {rpc_socket: /a, session_socket: /b, admin_socket: /c, metrics_socket: /c}",
       "listen.metrics_socket: same as listen.admin_socket"},
      {"listen: {rpc_socket: /a, session_socket: /b, metrics_socket_access: everybody}",
       "listen.metrics_socket_access: \"everybody\"; expected owner or group"},
  };
  for (const auto& c : kCases) {
    v1::Config config;
    const absl::Status status = ParseConfig(c.yaml, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.yaml;
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith(c.error)) << c.yaml;
  }
}

TEST(Config, LongestSocketPathIsAccepted) {
  v1::Config config;
  const std::string path = absl::StrCat("/", std::string(106, 'x'));
  EXPECT_TRUE(ParseConfig(absl::StrCat(kDram, "listen: {rpc_socket: ", path, ", session_socket: /a}"), &config).ok());
}

// Names of all fields, including those of nested messages.
void CollectFields(const google::protobuf::Descriptor& message, std::set<std::string>* names) {
  for (int i = 0; i < message.field_count(); ++i) {
    names->insert(message.field(i)->name());
    if (message.field(i)->message_type() != nullptr) CollectFields(*message.field(i)->message_type(), names);
  }
}

TEST(Config, TheExampleShowsEveryFieldAndIsAccepted) {
  v1::Config config;
  const absl::Status status = LoadConfig(ASHLAR_EXAMPLE, &config);
  EXPECT_TRUE(status.ok()) << status;
  std::stringstream text;
  text << std::ifstream(ASHLAR_EXAMPLE).rdbuf();
  std::set<std::string> names;
  CollectFields(*v1::Config::descriptor(), &names);
  EXPECT_GT(names.size(), 40u);
  for (const std::string& name : names) EXPECT_THAT(text.str(), ::testing::ContainsRegex("[ \n{]" + name + ":"));
}

TEST(Config, UnreadableFilesAreNamed) {
  v1::Config config;
  const absl::Status missing = LoadConfig("/nonexistent/ashlard.yaml", &config);
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("/nonexistent/ashlard.yaml"));
  EXPECT_FALSE(LoadConfig(::testing::TempDir(), &config).ok());

  const std::string path = ::testing::TempDir() + "ashlard_config_test.yaml";
  std::ofstream(path) << Minimal() << "log: {level: 5}\n";
  const absl::Status bad = LoadConfig(path, &config);
  EXPECT_THAT(std::string(bad.message()), HasSubstr(path + ": log.level: \"5\"; expected"));
  unlink(path.c_str());
}

TEST(Config, ExpandsEnvironmentVariables) {
  setenv("ASHLAR_TEST_NODE", "rack1-07", 1);
  EXPECT_EQ(*ExpandEnvironment("node: ${ASHLAR_TEST_NODE}\nat: $5 {x} ${ASHLAR_TEST_NODE}:1"),
            "node: rack1-07\nat: $5 {x} rack1-07:1");
  EXPECT_EQ(*ExpandEnvironment("# ${NOT_SET}\na: b # nor ${this}\nc: a#${ASHLAR_TEST_NODE}"),
            "# ${NOT_SET}\na: b # nor ${this}\nc: a#rack1-07");
  unsetenv("ASHLAR_TEST_NODE");
  const auto refused = [](const char* text) { return std::string(ExpandEnvironment(text).status().message()); };
  EXPECT_EQ(refused("a: b\nc: ${ASHLAR_TEST_NODE}"),
            "line 2: ${ASHLAR_TEST_NODE}: the environment variable is not set");
  EXPECT_EQ(refused("${no end"), "line 1: ${ must be followed by a variable's name and }");
  EXPECT_EQ(refused("\n\n${a-b}"), "line 3: ${ must be followed by a variable's name and }");
}

}  // namespace
}  // namespace ashlar::daemon
