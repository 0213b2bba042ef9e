// SPDX-License-Identifier: Apache-2.0
#include "daemon/session/region_guard.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/session/region.h"
#include "daemon/testing/node.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kGuardedPage = 4096, kGuardedBytes = 256 * kGuardedPage;

// Writers and the guard are ordered by the kernel, which ThreadSanitizer does not see; two writers of one place need
// not be ordered.
__attribute__((no_sanitize("thread"))) void Write(const Region& region, uint64_t offset, uint64_t bytes,
                                                  uint8_t value) {
  auto* const words = reinterpret_cast<volatile uint64_t*>(region.data() + offset);
  for (uint64_t i = 0; i < bytes / sizeof(uint64_t); ++i) words[i] = 0x0101010101010101 * value;
}
__attribute__((no_sanitize("thread"))) std::byte FirstByte(const Region& region) {
  return *const_cast<volatile std::byte*>(region.data());
}

class RegionGuardTest : public testing::Test {
 protected:
  void SetUp() override {
    if (guard_ == nullptr) GTEST_SKIP() << "userfaultfd is not allowed here";
  }
  struct Memory {
    UniqueFd memfd;
    std::shared_ptr<Region> region;
  };
  // Of an engine that has touched all of it.
  Memory Make() {
    Memory made{MakeMemfd(kGuardedBytes, F_SEAL_SHRINK), nullptr};
    EXPECT_EQ(fallocate(made.memfd.get(), 0, 0, kGuardedBytes), 0);
    auto region = Region::Register(made.memfd, kGuardedBytes);
    EXPECT_TRUE(region.ok());
    made.region = *std::move(region);
    made.region->GuardWith(guard_.get());
    return made;
  }
  static void Free(const Memory& memory, uint64_t offset, uint64_t bytes) {
    EXPECT_EQ(fallocate(memory.memfd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                        static_cast<off_t>(bytes)),
              0);
  }
  static uint64_t BytesThere(const Memory& memory) {
    struct stat file {};
    EXPECT_EQ(fstat(memory.memfd.get(), &file), 0);
    return static_cast<uint64_t>(file.st_blocks) * 512;
  }
  // Pages of the daemon's mapping that use memory.
  static size_t Resident(const Region& region) {
    std::vector<unsigned char> pages(kGuardedBytes / kGuardedPage);
    EXPECT_EQ(mincore(region.data(), kGuardedBytes, pages.data()), 0);
    size_t count = 0;
    for (const unsigned char page : pages) count += page & 1;
    return count;
  }

  const std::shared_ptr<RegionGuard> guard_ = RegionGuard::Make();
};

TEST_F(RegionGuardTest, PresentMemoryIsTheEngines) {
  const Memory memory = Make();
  std::memset(memory.region->data(), 7, kGuardedBytes);
  char byte = 0;
  ASSERT_EQ(pread(memory.memfd.get(), &byte, 1, kGuardedBytes - 1), 1);
  EXPECT_EQ(byte, 7);
  EXPECT_FALSE(memory.region->lost());
  Free(memory, kGuardedPage, kGuardedPage);
  ASSERT_EQ(fallocate(memory.memfd.get(), 0, kGuardedPage, kGuardedPage), 0);
  memory.region->data()[kGuardedPage] = std::byte{1};
  EXPECT_FALSE(memory.region->lost()) << "it was there again";
  EXPECT_TRUE(memory.region->CheckWhole("field").ok());
}

TEST_F(RegionGuardTest, AFreedPageIsNotAllocatedByTheDaemon) {
  const Memory memory = Make(), other = Make();
  Write(*memory.region, 0, kGuardedBytes, 7);
  Free(memory, 0, kGuardedBytes / 2);
  EXPECT_EQ(FirstByte(*memory.region), std::byte{0});  // reading would also allocate
  Write(*memory.region, 0, kGuardedBytes, 8);
  EXPECT_EQ(BytesThere(memory), kGuardedBytes / 2);
  EXPECT_TRUE(memory.region->lost());
  ASSERT_EQ(fallocate(memory.memfd.get(), 0, 0, kGuardedBytes), 0);
  const absl::Status refused = memory.region->CheckWhole("field");
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("field: pages of the region were freed while the daemon used"));
  EXPECT_TRUE(Eventually([&] { return Resident(*memory.region) == 0; })) << "what stands in for it is emptied";
  EXPECT_FALSE(other.region->lost());
  const auto again = Region::Register(memory.memfd, kGuardedBytes);
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE((*again)->CheckWhole("field").ok());
}

// Four threads write like landings, while the engine frees the pages, and regions end.
TEST_F(RegionGuardTest, FreedDuringWriteIsNotCharged) {
  for (int round = 0; round < 20; ++round) {
    const Memory memory = Make();
    std::vector<std::thread> writers;
    for (int writer = 0; writer < 4; ++writer) {
      writers.emplace_back([region = memory.region, writer] {
        for (int pass = 0; pass < 8; ++pass) {
          const uint64_t quarter = (writer + pass) % 4;
          Write(*region, quarter * kGuardedBytes / 4, kGuardedBytes / 4, static_cast<uint8_t>(pass));
        }
      });
    }
    Free(memory, 0, kGuardedBytes);
    for (std::thread& writer : writers) writer.join();
    EXPECT_EQ(BytesThere(memory), 0u) << round;
  }
}

TEST_F(RegionGuardTest, PagesBeyondTheEndDoNotReplaceMissingOnes) {
  const UniqueFd memfd = MakeMemfd(kGuardedBytes, F_SEAL_SHRINK);
  ASSERT_EQ(fallocate(memfd.get(), FALLOC_FL_KEEP_SIZE, kGuardedBytes, kGuardedBytes), 0);
  const auto region = Region::Register(memfd, kGuardedBytes);
  ASSERT_TRUE(region.ok());
  EXPECT_EQ((*region)->Measure().missing_bytes, kGuardedBytes);
  EXPECT_NE(fallocate(memfd.get(), FALLOC_FL_KEEP_SIZE, kGuardedBytes, kGuardedBytes), 0)
      << "nor can there be any later";
  EXPECT_NE(ftruncate(memfd.get(), 2 * kGuardedBytes), 0);
}

TEST_F(RegionGuardTest, AGrowableMemfdIsNotRegistered) {
  const UniqueFd memfd = MakeMemfd(kGuardedBytes, F_SEAL_SHRINK | F_SEAL_SEAL);
  const absl::Status refused = Region::Register(memfd, kGuardedBytes).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(), "register_region.descriptor: cannot be sealed with F_SEAL_GROW");
  const UniqueFd sealed = MakeMemfd(kGuardedBytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_TRUE(Region::Register(sealed, kGuardedBytes).ok());
}

}  // namespace
}  // namespace ashlar::daemon
