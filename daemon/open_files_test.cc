// SPDX-License-Identifier: Apache-2.0
#include "daemon/open_files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "ashlar/v1/config.pb.h"
#include "daemon/peer/channels/peer_bounds.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kArena = 1 << 20;

v1::Config WithSessions(uint64_t arenas, uint32_t sessions) {
  v1::Config config;
  config.mutable_dram()->set_arena_bytes(kArena);
  config.mutable_sessions()->set_max_sessions(sessions);
  config.add_tenants()->set_dram_bytes(arenas * kArena);
  config.add_tenants()->set_dram_bytes(kArena + kArena / 2);
  return config;
}

// The result of a process with these soft and hard limits, and whether its soft limit then equals the hard one.
struct Answer {
  bool ok, raised;
};
Answer Ask(const v1::Config& config, rlim_t soft, rlim_t hard) {
  const pid_t child = fork();
  if (child == 0) {
    rlimit limit{soft, hard};
    setrlimit(RLIMIT_NOFILE, &limit);
    const absl::Status status = RaiseOpenFilesLimit(config);
    getrlimit(RLIMIT_NOFILE, &limit);
    const bool named = status.ok() || status.message().find("dram.arena_bytes") != absl::string_view::npos;
    _exit((named ? 0 : 4) + (status.ok() ? 1 : 0) + (limit.rlim_cur == hard ? 2 : 0));
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_LT(WEXITSTATUS(status), 4) << "the error names no field";
  return {(WEXITSTATUS(status) & 1) != 0, (WEXITSTATUS(status) & 2) != 0};
}

TEST(OpenFiles, ArenasOfAllTenantsAndSessionsCount) {
  const uint64_t none = OpenFilesNeeded(WithSessions(0, 0));
  EXPECT_EQ(OpenFilesNeeded(WithSessions(1000, 0)), none + 1000);
  EXPECT_GE(OpenFilesNeeded(WithSessions(0, 100)), none + 300);
  v1::Config hbm = WithSessions(1000, 0);
  hbm.add_hbm()->set_arena_bytes(kArena);
  hbm.mutable_tenants(0)->set_hbm_bytes(7 * kArena - 1);
  EXPECT_EQ(OpenFilesNeeded(hbm), none + 1007);
  v1::Config regions = WithSessions(0, 0);
  regions.mutable_tenants(1)->set_max_regions(30);
  EXPECT_EQ(OpenFilesNeeded(regions), none + 30);
  regions.mutable_tenants(1)->set_max_sessions(5);
  EXPECT_GE(OpenFilesNeeded(regions), none + 30 + 2 * 5) << "descriptors that may be on their way";
}

TEST(OpenFiles, PeersCount) {
  v1::Config config = WithSessions(1000, 10);
  const uint64_t alone = OpenFilesNeeded(config);
  config.mutable_cluster()->add_peers()->set_node("b");
  const uint64_t one = OpenFilesNeeded(config);
  EXPECT_GE(one, alone + PeerBounds::kFiles + 2 * PeerListener::kConnections) << "connections of strangers, too";
  config.mutable_cluster()->add_peers()->set_node("c");
  EXPECT_EQ(OpenFilesNeeded(config), one + 3) << "its calls, and the transport's two";
  config.mutable_cluster()->clear_peers();
  EXPECT_EQ(OpenFilesNeeded(config), one + 3 * (PeerChannels::kMostPeers - 1)) << "all are peers";
}

TEST(OpenFiles, RaisesTheSoftLimitAsFarAsPermitted) {
  const v1::Config config = WithSessions(100, 1);
  const uint64_t needed = OpenFilesNeeded(config);
  const Answer enough = Ask(config, 64, needed);
  EXPECT_TRUE(enough.ok && enough.raised);
  const Answer few = Ask(config, 64, needed - 1);
  EXPECT_FALSE(few.ok || few.raised);
}

}  // namespace
}  // namespace ashlar::daemon
