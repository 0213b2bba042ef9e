// SPDX-License-Identifier: Apache-2.0
#include "daemon/tiers/tier_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"

namespace ashlar::daemon {
namespace {

using ::testing::StartsWith;

absl::StatusOr<std::unique_ptr<TierSet>> Make(const std::string& dram) {
  v1::Config config;
  const absl::Status parsed =
      ParseConfig(absl::StrCat("listen: {rpc_socket: /a, session_socket: /b}\ndram: {", dram, "}\n"), &config);
  if (!parsed.ok()) return parsed;
  MonotonicClock clock;
  EventLoop loop(16, clock);
  return TierSet::Make(config, loop, {});
}

TEST(TierSet, AnAbsentNumaNodeIsRefusedByName) {
  const auto refused = Make("capacity_bytes: 64MiB, numa: {policy: bind, nodes: [0, 1000]}").status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), StartsWith("dram.numa.nodes["));
}

TEST(TierSet, MemoryOfANodeIsTaken) {
  const storage::NumaPolicy policy{storage::NumaPolicy::Mode::kBind, {0}};
  if (!storage::CheckNodes(policy).ok()) GTEST_SKIP() << "this machine has no NUMA node 0 that may be used";
  const auto tiers = Make("capacity_bytes: 64MiB, huge_pages: true, numa: {policy: bind, nodes: [0]}");
  EXPECT_TRUE(tiers.ok()) << tiers.status();
}

TEST(TierSet, MemoryThatCannotBeLockedIsRefusedByName) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  if (geteuid() == 0 || limit.rlim_max >= uint64_t{1} << 40) GTEST_SKIP() << "this process may lock any memory";
  const auto refused = Make("capacity_bytes: 1TiB, lock: true").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), StartsWith("dram.lock: "));
}

}  // namespace
}  // namespace ashlar::daemon
