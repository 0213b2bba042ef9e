// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/numa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>

#include "storage/memory/arena.h"
#include "storage/tier/memory_tier.h"

namespace ashlar::storage {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Mode = NumaPolicy::Mode;
constexpr uint64_t kBoundBytes = 1 << 20;

class Nodes : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(root_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  absl::Status Check(std::vector<uint32_t> nodes) { return CheckNodes({Mode::kBind, std::move(nodes)}, root_); }

  std::string root_ = "/tmp/ashlar_nodes_XXXXXX";
};

TEST_F(Nodes, NodesMustHaveMemory) {
  Write("/sys/devices/system/node/has_memory", "0-1,4\n");
  EXPECT_TRUE(Check({0, 1, 4}).ok());
  EXPECT_TRUE(Check({4, 0}).ok());
  const absl::Status refused = Check({1, 3});
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()), StartsWith("nodes[1]: this process cannot use memory of node 3"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("0, 1, 4"));
  EXPECT_TRUE(CheckNodes({}, root_).ok());
}

TEST_F(Nodes, NodesMustBeAllowed) {
  Write("/sys/devices/system/node/has_memory", "0-3\n");
  Write("/proc/self/status", "Name:\tashlard\nMems_allowed:\t4\nMems_allowed_list:\t2-3\n");
  EXPECT_TRUE(Check({2, 3}).ok());
  EXPECT_THAT(std::string(Check({1}).message()), HasSubstr("usable nodes: 2, 3"));
}

TEST_F(Nodes, NumaIsAbsentWithoutKernelSupport) {
  EXPECT_THAT(std::string(Check({0}).message()), HasSubstr("usable nodes: none"));
}

TEST_F(Nodes, ReportAvailableMemory) {
  Write("/sys/devices/system/node/node0/meminfo",
        "\nNode 0 MemTotal:        9000 kB\nNode 0 MemFree:          100 kB\nNode 0 MemUsed: 8900 kB\n"
        "Node 0 Active(anon):     7000 kB\nNode 0 Active(file):       20 kB\nNode 0 Inactive(file):      3 kB\n");
  Write("/sys/devices/system/node/node2/meminfo", "Node 2 MemFree: 1000 kB\n");
  EXPECT_EQ(AvailableOnNodes({0}, root_), 123u * 1024);
  EXPECT_EQ(AvailableOnNodes({0, 2}, root_), 1123u * 1024);
  EXPECT_EQ(AvailableOnNodes({0, 1}, root_), UINT64_MAX) << "no bound is known";
}

// Asks the kernel for the policy of the memory at `address`; false if it has no NUMA, or a sandbox forbids the call.
bool PolicyOf(const void* address, int* mode, uint64_t* nodes) {
  std::array<uint64_t, NumaPolicy::kMaxNodes / 64> mask{};
  if (syscall(SYS_get_mempolicy, mode, mask.data(), NumaPolicy::kMaxNodes + 1, address, MPOL_F_ADDR) != 0) return false;
  *nodes = mask[0];
  return true;
}

TEST(NumaPolicy, IsSetBeforePagesAreAllocated) {
  int mode = 0;
  uint64_t nodes = 0;
  if (!CheckNodes({Mode::kBind, {0}}).ok() || !PolicyOf(&nodes, &mode, &nodes)) {
    GTEST_SKIP() << "this machine has no NUMA node 0 that may be used";
  }
  const struct {
    Mode mode;
    int kernels;
  } kPolicies[] = {{Mode::kBind, MPOL_BIND}, {Mode::kPreferred, MPOL_PREFERRED}, {Mode::kInterleave, MPOL_INTERLEAVE}};
  for (const auto& policy : kPolicies) {
    for (const bool huge_pages : {false, true}) {
      const auto arena = Arena::Make(kBoundBytes, {.huge_pages = huge_pages, .numa = {policy.mode, {0}}});
      ASSERT_TRUE(arena.ok()) << arena.status();
      ASSERT_TRUE(PolicyOf(arena->data(), &mode, &nodes));
      EXPECT_EQ(mode, policy.kernels);
      EXPECT_EQ(nodes, 1u);
      arena->data()[kBoundBytes - 1] = std::byte{1};
    }
  }
  const auto anywhere = Arena::Make(kBoundBytes, {});
  ASSERT_TRUE(anywhere.ok());
  ASSERT_TRUE(PolicyOf(anywhere->data(), &mode, &nodes));
  EXPECT_EQ(mode, MPOL_DEFAULT);
}

TEST(NumaPolicy, ReportsTheKernelsRefusal) {
  const auto arena = Arena::Make(kBoundBytes, {.numa = {Mode::kBind, {NumaPolicy::kMaxNodes - 1}}});
  EXPECT_TRUE(absl::IsFailedPrecondition(arena.status())) << arena.status();
  EXPECT_THAT(std::string(arena.status().message()), StartsWith("arena: "));
  EXPECT_THAT(std::string(arena.status().message()), HasSubstr("mbind"));
}

TEST(NumaPolicy, InvalidPolicyNamesField) {
  const auto tier = MemoryTier::Make(
      {.capacity_bytes = kBoundBytes, .arena_bytes = kBoundBytes, .arena = {.numa = {Mode::kPreferred, {777}}}});
  EXPECT_TRUE(absl::IsInvalidArgument(tier.status())) << tier.status();
  EXPECT_THAT(std::string(tier.status().message()), StartsWith("dram.numa.nodes[0]: "));
}

}  // namespace
}  // namespace ashlar::storage
