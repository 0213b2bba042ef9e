// SPDX-License-Identifier: Apache-2.0
// Which numbers may be 0 in a configuration file.
#include "daemon/config/yaml_message.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kSocketsAndDram =
    "listen: {rpc_socket: /run/a.sock, session_socket: /run/b.sock}\ndram: {capacity_bytes: 4GiB}\n";

// An omitted limit has a default of up to 512 GiB: 0 must not silently mean that.
TEST(YamlMessage, RefusesZeroForADefault) {
  const std::string cluster =
      "cluster: {node: a, control_address: \"a:1\", transport_address: \"a:2\", tls: {insecure: true";
  const std::string etcd = "}, etcd: {endpoints: [\"e:1\"]";
  const std::string tenant = absl::StrCat("tenants: [{name: a, uids: [", geteuid(), "], dram_bytes: 4GiB");
  const struct {
    std::string before, field, after;
  } cases[] = {
      {"", "drain_seconds", ""},
      {"prefill: {", "tries", "}"},
      {"events: {", "kept_batches", "}"},
      {"leases: {", "unused_seconds", "}"},
      {"leases: {", "max_leases", "}"},
      {"sessions: {", "max_sessions", "}"},
      {"sessions: {", "region_bytes", "}"},
      {"sessions: {", "max_regions", "}"},
      {"workers: {", "threads", "}"},
      {"workers: {", "queue_depth", "}"},
      {"hbm: {capacity_bytes: 1GiB, ", "arena_bytes", "}"},
      {"ssd: {folder: /a, capacity_bytes: 1GiB, ", "queue_depth", "}"},
      {cluster + ", ", "reload_seconds", etcd + "}}"},
      {cluster + etcd + ", ", "lease_seconds", "}}"},
      {cluster + etcd + "}, ", "replica_bytes", "}"},
      {tenant + ", ", "region_bytes", "}]"},
      {tenant + ", ", "max_sessions", "}]"},
      {tenant + ", ", "max_leases", "}]"},
      {tenant + ", ", "max_landings", "}]"},
      {tenant + ", ", "landing_bytes", "}]"},
      {tenant + ", ", "model_bytes", "}]"},
  };
  for (const auto& each : cases) {
    const auto read = [&](const char* value) {
      v1::Config config;
      return ParseConfig(std::string(kSocketsAndDram) + each.before + each.field + ": " + value + each.after + "\n",
                         &config);
    };
    for (const char* zero : {"0", "00"}) {
      const std::string refused(read(zero).message());
      EXPECT_THAT(refused, HasSubstr(each.field + ": 0 is not allowed; leave the field out")) << each.before;
    }
    const std::string other(read("2").message());
    EXPECT_THAT(other, Not(HasSubstr("is not allowed"))) << each.before;
  }
}

TEST(YamlMessage, AcceptsZeroIfItMeansNone) {
  v1::Config config;
  const absl::Status read = ParseConfig(
      absl::StrCat(std::string(kSocketsAndDram),
                   "hbm: {capacity_bytes: 0}\nscrub: {bytes_per_second: 0}\ntenants: [{name: a, uids: [0], ",
                   "dram_bytes: 4GiB, hbm_bytes: 0, ssd_bytes: 0, ttl_seconds: 0, calls_per_second: 0, ",
                   "bytes_per_second: 0, public_floor: {hbm_bytes: 0, dram_bytes: 0, ssd_bytes: 0}}]\n"),
      &config);
  EXPECT_TRUE(read.ok()) << read;
}

}  // namespace
}  // namespace ashlar::daemon
