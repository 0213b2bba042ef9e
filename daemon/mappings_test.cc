// SPDX-License-Identifier: Apache-2.0
#include "daemon/mappings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"
#include "daemon/peer/channels/peer_bounds.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kArenaBytes = 1 << 20;
constexpr uint64_t kKernelsDefault = 65530;

v1::Config WithRegions(uint64_t arenas, uint32_t regions) {
  v1::Config config;
  config.mutable_dram()->set_arena_bytes(kArenaBytes);
  config.add_hbm()->set_arena_bytes(kArenaBytes);
  config.add_tenants()->set_dram_bytes(arenas * kArenaBytes);
  config.add_tenants()->set_max_regions(regions);
  return config;
}

TEST(Mappings, ArenasRegionsAndThreadsOfAllTenantsCount) {
  const uint64_t none = MappingsNeeded(WithRegions(0, 0));
  EXPECT_GE(none, 8192u) << "what the daemon needs by itself";
  EXPECT_EQ(MappingsNeeded(WithRegions(1000, 0)), none + 1000);
  EXPECT_EQ(MappingsNeeded(WithRegions(0, 500)), none + 500);
  v1::Config config = WithRegions(1000, 500);
  config.mutable_tenants(0)->set_hbm_bytes(7 * kArenaBytes - 1);
  config.mutable_workers()->set_threads(10);
  config.mutable_ssd()->set_threads(5);
  EXPECT_EQ(MappingsNeeded(config), none + 1000 + 500 + 7 + 2 * 15);
}

TEST(Mappings, PeersCount) {
  v1::Config config = WithRegions(1000, 500);
  const uint64_t alone = MappingsNeeded(config);
  config.mutable_cluster()->add_peers()->set_node("b");
  const uint64_t one = MappingsNeeded(config);
  EXPECT_GT(one, alone + PeerBounds::kMappings);
  config.mutable_cluster()->add_peers()->set_node("c");
  config.mutable_cluster()->add_peers()->set_node("d");
  EXPECT_EQ(MappingsNeeded(config), one + 2) << "a transport connection of each";
  config.mutable_cluster()->add_peers()->set_node("*");
  const uint64_t any = MappingsNeeded(config);
  config.mutable_cluster()->clear_peers();
  EXPECT_EQ(MappingsNeeded(config), any) << "all are peers";
  EXPECT_GE(any, one + PeerChannels::kMostPeers / 4);
}

TEST(Mappings, MustNotExceedMachineLimit) {
  std::string root = testing::TempDir() + "mappings-XXXXXX";
  ASSERT_NE(mkdtemp(root.data()), nullptr);
  std::filesystem::create_directories(root + "/proc/sys/vm");
  const v1::Config config = WithRegions(1000, 500);
  const auto at_limit = [&](uint64_t limit) {
    std::ofstream(root + "/proc/sys/vm/max_map_count") << limit << "\n";
    return CheckMappings(config, root);
  };
  EXPECT_TRUE(at_limit(MappingsNeeded(config)).ok());
  const absl::Status refused = at_limit(MappingsNeeded(config) - 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  for (const char* named : {"vm.max_map_count", "dram.arena_bytes", "tenants[].max_regions"}) {
    EXPECT_THAT(std::string(refused.message()), HasSubstr(named));
  }
  std::filesystem::remove_all(root);
  EXPECT_TRUE(CheckMappings(config, root).ok()) << "no limit that can be read";
}

// For any number of tenants.
TEST(Mappings, DefaultsFitKernelDefault) {
  for (const int count : {1, 7, 300}) {
    std::string tenants;
    for (int i = 0; i < count; ++i) {
      tenants += "  - {name: t" + std::to_string(i) + ", uids: [" + std::to_string(i) + "], dram_bytes: 64MiB}\n";
    }
    v1::Config config;
    const absl::Status parsed = ParseConfig(
        "listen: {rpc_socket: /r, session_socket: /s}\ndram: {capacity_bytes: 64GiB}\ntenants:\n" + tenants, &config);
    ASSERT_TRUE(parsed.ok()) << parsed;
    config.mutable_workers()->set_threads(256);
    EXPECT_LE(MappingsNeeded(config), kKernelsDefault) << count;
  }
}

}  // namespace
}  // namespace ashlar::daemon
