// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <utility>

namespace ashlar::storage {
namespace {

constexpr uint64_t kArenaBytes = 1 << 20;

TEST(Arena, CanOnlyBeMappedReadOnly) {
  absl::StatusOr<Arena> arena = Arena::Make(kArenaBytes, {});
  ASSERT_TRUE(arena.ok()) << arena.status();
  const int descriptor = arena->descriptor();

  EXPECT_EQ(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0), MAP_FAILED);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(write(descriptor, "x", 1), -1);
  EXPECT_EQ(errno, EPERM);

  void* engine = mmap(nullptr, kArenaBytes, PROT_READ, MAP_SHARED, descriptor, 0);
  ASSERT_NE(engine, MAP_FAILED);
  EXPECT_EQ(mprotect(engine, kArenaBytes, PROT_READ | PROT_WRITE), -1);
  arena->data()[12345] = std::byte{42};
  EXPECT_EQ(static_cast<const std::byte*>(engine)[12345], std::byte{42});
  munmap(engine, kArenaBytes);
}

TEST(Arena, IsHostMemory) {
  const absl::StatusOr<Arena> made = Arena::Make(kArenaBytes, {});
  ASSERT_TRUE(made.ok()) << made.status();
  const kernels::ArenaMemory& arena = *made;
  EXPECT_EQ(arena.kind(), kernels::MemoryKind::kHost);
  EXPECT_EQ(arena.bytes(), kArenaBytes);
  EXPECT_EQ(arena.data(), made->data());
  EXPECT_EQ(arena.descriptor(), made->descriptor());
}

TEST(Arena, SizeAndSealsCannotChange) {
  absl::StatusOr<Arena> arena = Arena::Make(kArenaBytes, {.huge_pages = true});
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ(ftruncate(arena->descriptor(), kArenaBytes / 2), -1);
  EXPECT_EQ(ftruncate(arena->descriptor(), kArenaBytes * 2), -1);
  EXPECT_EQ(fcntl(arena->descriptor(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(fcntl(arena->descriptor(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(Arena, ClosesItsDescriptorOnce) {
  absl::StatusOr<Arena> arena = Arena::Make(kArenaBytes, {});
  ASSERT_TRUE(arena.ok()) << arena.status();
  const int descriptor = arena->descriptor();
  {
    const Arena owner = *std::move(arena);
    EXPECT_EQ(owner.descriptor(), descriptor);
    EXPECT_NE(fcntl(descriptor, F_GETFD), -1);
  }
  EXPECT_EQ(fcntl(descriptor, F_GETFD), -1);
}

TEST(Arena, PagesAreAllocatedAtCreation) {
  for (const bool huge_pages : {false, true}) {
    absl::StatusOr<Arena> arena = Arena::Make(kArenaBytes, {.huge_pages = huge_pages});
    ASSERT_TRUE(arena.ok()) << arena.status();
    struct stat file;
    ASSERT_EQ(fstat(arena->descriptor(), &file), 0);
    EXPECT_GE(static_cast<uint64_t>(file.st_blocks) * 512, kArenaBytes);
    EXPECT_EQ(arena->data()[kArenaBytes - 1], std::byte{0});
  }
}

TEST(Arena, ReportsReasonForMissingMemory) {
  // First no address space, then address space but no memory.
  for (const uint64_t bytes : {uint64_t{1} << 62, uint64_t{1} << 45}) {
    const absl::StatusOr<Arena> arena = Arena::Make(bytes, {});
    EXPECT_TRUE(absl::IsResourceExhausted(arena.status())) << arena.status();
  }
}

}  // namespace
}  // namespace ashlar::storage
