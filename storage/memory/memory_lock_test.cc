// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/memory_lock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "storage/memory/arena.h"
#include "storage/tier/memory_tier.h"

namespace ashlar::storage {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
constexpr uint64_t kLockedBytes = 1 << 20;

uint64_t LockedBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    uint64_t kilobytes = 0;
    if (word == "VmLck:" && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

// Runs `body` on a thread without CAP_IPC_LOCK.
void Unprivileged(const std::function<void()>& body) {
  std::thread([&] {
    __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    __user_cap_data_struct data[2] = {};
    ASSERT_EQ(syscall(SYS_capget, &header, data), 0);
    data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective &= ~CAP_TO_MASK(CAP_IPC_LOCK);
    ASSERT_EQ(syscall(SYS_capset, &header, data), 0);
    body();
  }).join();
}

uint64_t HardLimit() {
  rlimit limit{};
  EXPECT_EQ(getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  return limit.rlim_max;
}

TEST(MemoryLock, KeepsAnArenaWhileItLives) {
  if (!AllowLocking(2 * kLockedBytes).ok()) GTEST_SKIP() << "this process may not lock 2 MiB of memory";
  const uint64_t before = LockedBytes();
  {
    const auto arena = Arena::Make(kLockedBytes, {.lock = true});
    ASSERT_TRUE(arena.ok()) << arena.status();
    EXPECT_EQ(LockedBytes(), before + kLockedBytes);
  }
  EXPECT_EQ(LockedBytes(), before);
  const auto plain = Arena::Make(kLockedBytes, {});
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(LockedBytes(), before);
}

TEST(MemoryLock, IsRefusedWithTheLimit) {
  const uint64_t limit = HardLimit();
  if (limit >= uint64_t{1} << 40) GTEST_SKIP() << "this process may lock any memory";
  Unprivileged([&] {
    const uint64_t before = LockedBytes();
    const uint64_t too_much = (limit / kLockedBytes + 2) * kLockedBytes;
    const absl::Status refused = AllowLocking(too_much);
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(std::to_string(limit) + " bytes (RLIMIT_MEMLOCK"));
    EXPECT_EQ(LockedBytes(), before) << "asking locks nothing";

    const auto tier =
        MemoryTier::Make({.capacity_bytes = too_much, .arena_bytes = kLockedBytes, .arena = {.lock = true}});
    EXPECT_TRUE(absl::IsFailedPrecondition(tier.status())) << tier.status();
    EXPECT_THAT(std::string(tier.status().message()), StartsWith("dram.lock: "));
  });
}

TEST(MemoryLock, SoftLimitsAreRaised) {
  const uint64_t limit = HardLimit();
  if (limit < 2 * kLockedBytes) GTEST_SKIP() << "this process may not lock 2 MiB of memory";
  const rlimit lowered{.rlim_cur = 4096, .rlim_max = limit};
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &lowered), 0);
  Unprivileged([] { EXPECT_TRUE(AllowLocking(kLockedBytes).ok()); });
  rlimit now{};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &now), 0);
  EXPECT_EQ(now.rlim_cur, limit);
}

// Another part of the process has locked all that is allowed: there is no space, as if there were no memory.
TEST(MemoryLock, AnArenaThatCannotBeLockedIsNotCreated) {
  const uint64_t limit = HardLimit();
  if (limit >= uint64_t{1} << 40) GTEST_SKIP() << "this process may lock any memory";
  Unprivileged([&] {
    const auto arena = Arena::Make((limit / kLockedBytes + 2) * kLockedBytes, {.lock = true});
    EXPECT_TRUE(absl::IsResourceExhausted(arena.status())) << arena.status();
    EXPECT_THAT(std::string(arena.status().message()), HasSubstr("mlock"));
  });
}

}  // namespace
}  // namespace ashlar::storage
