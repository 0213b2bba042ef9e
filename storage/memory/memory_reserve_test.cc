// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/memory_reserve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace ashlar::storage {
namespace {

using ::testing::HasSubstr;

// A machine's files, in the form that AvailableMemory reads.
class Machine : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(root_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  std::string root_ = "/tmp/ashlar_machine_XXXXXX";
};

TEST_F(Machine, UnknownMachineSetsNoBound) {
  EXPECT_EQ(AvailableMemory(root_), UINT64_MAX);
}

TEST_F(Machine, ReportsAvailableMemory) {
  Write("/proc/meminfo", "MemTotal:       8000 kB\nMemFree:        1000 kB\nMemAvailable:   3000 kB\n");
  EXPECT_EQ(AvailableMemory(root_), 3000u * 1024);
  Write("/proc/self/cgroup", "4:memory:/old\n0::/\n");
  EXPECT_EQ(AvailableMemory(root_), 3000u * 1024) << "the root group has no limit";
}

TEST_F(Machine, EveryGroupAboveTheProcessCounts) {
  Write("/proc/meminfo", "MemAvailable:   3000 kB\n");
  Write("/proc/self/cgroup", "0::/outer/inner\n");
  Write("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
  Write("/sys/fs/cgroup/outer/inner/memory.current", "500000\n");
  EXPECT_EQ(AvailableMemory(root_), 3000u * 1024);
  Write("/sys/fs/cgroup/outer/memory.max", "1000000\n");
  Write("/sys/fs/cgroup/outer/memory.current", "900000\n");
  EXPECT_EQ(AvailableMemory(root_), 100'000u);
  Write("/sys/fs/cgroup/outer/memory.stat", "anon 600000\ninactive_file 200000\nactive_file 50000\nfile 300000\n");
  EXPECT_EQ(AvailableMemory(root_), 350'000u) << "cached files are given up first";
  Write("/sys/fs/cgroup/memory.max", "10\n");  // a container sees only its own group
  Write("/sys/fs/cgroup/memory.current", "20\n");
  EXPECT_EQ(AvailableMemory(root_), 0u);
}

TEST_F(Machine, GroupsOfVersion1Count) {
  Write("/proc/meminfo", "MemAvailable:   3000 kB\n");
  Write("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/outer/inner\n0::/\n");
  Write("/sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes", "9223372036854771712\n");
  Write("/sys/fs/cgroup/memory/outer/inner/memory.usage_in_bytes", "500000\n");
  EXPECT_EQ(AvailableMemory(root_), 3000u * 1024);
  Write("/sys/fs/cgroup/memory/outer/memory.limit_in_bytes", "1000000\n");
  Write("/sys/fs/cgroup/memory/outer/memory.usage_in_bytes", "900000\n");
  EXPECT_EQ(AvailableMemory(root_), 100'000u);
  Write("/sys/fs/cgroup/memory/outer/memory.stat",
        "inactive_file 9\ntotal_inactive_file 200000\ntotal_active_file 1\n");
  EXPECT_EQ(AvailableMemory(root_), 300'001u);
}

// Existing pages are not requested again, and memory that others need stays free.
TEST(ReservePages, CountsMissingPagesAndKeepsTheReserve) {
  constexpr uint64_t kBytes = 1 << 20;
  const int memfd = memfd_create("ashlar-test", MFD_CLOEXEC);
  ASSERT_GE(memfd, 0);
  const uint64_t available = AvailableMemory();
  ASSERT_EQ(ftruncate(memfd, static_cast<off_t>(2 * available)), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(ReservePages(memfd, kBytes, {.keep_free = 2 * available})));
  struct stat file;
  ASSERT_EQ(fstat(memfd, &file), 0);
  EXPECT_EQ(file.st_blocks, 0);
  EXPECT_TRUE(ReservePages(memfd, kBytes, {.present_bytes = kBytes}).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(ReservePages(memfd, 2 * available, {.present_bytes = kBytes})));
  close(memfd);
}

TEST(ReservePages, AllocatesPagesOrReportsHowManyExist) {
  constexpr uint64_t kBytes = 1 << 20, kMost = uint64_t{1} << 45;
  const int memfd = memfd_create("ashlar-test", MFD_CLOEXEC);
  ASSERT_GE(memfd, 0);
  ASSERT_EQ(ftruncate(memfd, kMost), 0);
  const absl::Status refused = ReservePages(memfd, kMost);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("bytes of memory requested"));
  struct stat file;
  ASSERT_EQ(fstat(memfd, &file), 0);
  EXPECT_EQ(file.st_blocks, 0);
  EXPECT_TRUE(ReservePages(memfd, kBytes).ok());
  ASSERT_EQ(fstat(memfd, &file), 0);
  EXPECT_GE(static_cast<uint64_t>(file.st_blocks) * 512, kBytes);
  close(memfd);
}

}  // namespace
}  // namespace ashlar::storage
