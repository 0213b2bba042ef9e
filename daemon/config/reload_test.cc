// SPDX-License-Identifier: Apache-2.0
// Reloads: which changes of the configuration a running daemon applies, and which it refuses.
#include "daemon/config/reload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr const char* kSockets = "listen: {rpc_socket: /a/rpc, session_socket: /a/session}\n";
constexpr const char* kTwoTenants =
    "dram: {capacity_bytes: 1GiB}\n"
    "tenants: [{name: a, uids: [1], dram_bytes: 512MiB}, {name: b, uids: [2], dram_bytes: 256MiB}]\n";

v1::Config Parsed(const std::string& yaml) {
  v1::Config config;
  const absl::Status status = ParseConfig(kSockets + yaml, &config);
  EXPECT_TRUE(status.ok()) << status;
  return config;
}

absl::StatusOr<std::vector<ConfigChange>> Changes(const std::string& before, const std::string& after) {
  return ChangesFor(Parsed(before), Parsed(after));
}

TEST(ChangesFor, NamesEachFieldWithItsValues) {
  const std::string later =
      "dram: {capacity_bytes: 1GiB}\n"
      "tenants: [{name: a, uids: [1], dram_bytes: 512MiB}, {name: b, uids: [2], dram_bytes: 384MiB, ttl_seconds: 60}]\n"
      "scrub: {bytes_per_second: 10MiB}\nlog: {level: debug}\n";
  const auto changes = Changes(kTwoTenants, later);
  ASSERT_TRUE(changes.ok()) << changes.status();
  ASSERT_THAT(*changes, SizeIs(5));
  std::string all;
  for (const ConfigChange& change : *changes) all += change.field + " " + change.before + " " + change.after + "\n";
  EXPECT_THAT(all, HasSubstr("tenants[1].dram_bytes 268435456 402653184\n"));
  EXPECT_THAT(all, HasSubstr("tenants[1].ttl_seconds 0 60\n"));
  EXPECT_THAT(all, HasSubstr("tenants[1].prefix_bytes 268435456 402653184\n")) << "its default is the largest budget";
  EXPECT_THAT(all, HasSubstr("scrub.bytes_per_second 0 10485760\n"));
  EXPECT_THAT(all, HasSubstr("log.level info debug\n"));
}

TEST(ChangesFor, AnEqualConfigurationChangesNothing) {
  const auto changes = Changes(kTwoTenants, std::string(kTwoTenants) + "drain_seconds: 10\n");
  ASSERT_TRUE(changes.ok());
  EXPECT_THAT(*changes, IsEmpty());
}

TEST(ChangesFor, NamesFieldsThatNeedRestart) {
  const struct {
    std::string later, field;
  } cases[] = {
      {"dram: {capacity_bytes: 2GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 512MiB}, {name: b, uids: [2], "
       "dram_bytes: 256MiB}]\n",
       "dram.capacity_bytes"},
      {"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1], dram_bytes: 512MiB}]\n", "tenants"},
      {"dram: {capacity_bytes: 1GiB}\ntenants: [{name: c, uids: [1], dram_bytes: 512MiB}, {name: b, uids: [2], "
       "dram_bytes: 256MiB}]\n",
       "tenants[0].name"},
      {"dram: {capacity_bytes: 1GiB}\ntenants: [{name: a, uids: [1, 3], dram_bytes: 512MiB}, {name: b, uids: [2], "
       "dram_bytes: 256MiB}]\n",
       "tenants[0].uids"},
      {std::string(kTwoTenants) + "eviction: lru\nscrub: {bytes_per_second: 1}\n", "eviction"},
      {std::string(kTwoTenants) + "gpu: {device: 0}\n", "gpu"},
      {std::string(kTwoTenants) + "sandbox: on\n", "sandbox"},
  };
  for (const auto& each : cases) {
    const auto changes = Changes(kTwoTenants, each.later);
    ASSERT_TRUE(absl::IsFailedPrecondition(changes.status())) << each.field << ": " << changes.status();
    EXPECT_THAT(std::string(changes.status().message()), HasSubstr(each.field));
    EXPECT_THAT(std::string(changes.status().message()), HasSubstr("needs a restart"));
    EXPECT_THAT(std::string(changes.status().message()), Not(HasSubstr("scrub")));
  }
}

TEST(FieldsOf, NamesAtMostEightFieldsAndNoValues) {
  std::vector<ConfigChange> changes = {{"log.level", "SECRET", "OTHER"}, {"drain_seconds", "1", "2"}};
  EXPECT_EQ(FieldsOf(changes), "log.level, drain_seconds");
  EXPECT_EQ(FieldsOf({}), "");
  changes.resize(8, {"c", "", ""});
  EXPECT_EQ(FieldsOf(changes), "log.level, drain_seconds, c, c, c, c, c, c");
  changes.resize(11, {"d", "", ""});
  EXPECT_EQ(FieldsOf(changes), "log.level, drain_seconds, c, c, c, c, c, c and 3 more");
}

}  // namespace
}  // namespace ashlar::daemon
