// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/block_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "storage/testing/disk_objects.h"
#include "storage/testing/temporary_folder.h"

namespace ashlar::storage {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

using limits::kExtentBytes;
constexpr uint64_t kBlock = BlockFile::kBlockBytes;

class BlockFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_FALSE(folder_.path().empty());
    const int probe = open((folder_ / "probe").c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
    if (probe < 0) GTEST_SKIP() << folder_.path() << " has no O_DIRECT";
    close(probe);
  }
  static struct stat Stat(const std::string& path) {
    struct stat info {};
    EXPECT_EQ(stat(path.c_str(), &info), 0);
    return info;
  }

  TemporaryFolder folder_;
  const std::string path_ = folder_ / "slab";
};

TEST_F(BlockFileTest, KeepsWritesAndPreallocatesBlocks) {
  ExtentMemory memory(2);
  memory.Fill(3);
  {
    auto file = OpenBlockFile(path_, 2 * kExtentBytes);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ((*file)->size(), 2 * kExtentBytes);
    EXPECT_GE(Stat(path_).st_blocks * 512u, 2 * kExtentBytes);
    EXPECT_EQ(Stat(path_).st_mode & 0777, 0600u);
    EXPECT_EQ((*file)->Write(kExtentBytes, {memory[0], kExtentBytes}), absl::OkStatus());
    EXPECT_EQ((*file)->Sync(), absl::OkStatus());
    EXPECT_EQ((*file)->Read(kExtentBytes, {memory[1], kExtentBytes}), absl::OkStatus());
    EXPECT_TRUE(SameExtent(memory[0], memory[1]));
  }
  std::memset(memory[1], 0, kExtentBytes);
  auto file = OpenBlockFile(path_, 3 * kExtentBytes);  // larger: the existing bytes stay
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->Read(kExtentBytes, {memory[1], kExtentBytes}), absl::OkStatus());
  EXPECT_TRUE(SameExtent(memory[0], memory[1]));
  EXPECT_EQ((*file)->Write(2 * kExtentBytes, {memory[0], kExtentBytes}), absl::OkStatus());
  file->reset();
  file = OpenBlockFile(path_, kExtentBytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(static_cast<uint64_t>(Stat(path_).st_size), kExtentBytes);
}

TEST_F(BlockFileTest, RefusesPartialBlocks) {
  ExtentMemory memory(1);
  std::byte* const at = memory[0];
  auto file = OpenBlockFile(path_, kExtentBytes);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->Write(0, {at + 1, kBlock}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*file)->Write(512, {at, kBlock}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*file)->Read(0, {at, 512}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*file)->Read(kExtentBytes, {at, kBlock}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*file)->Write(kExtentBytes - kBlock, {at, 2 * kBlock}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*file)->Write(UINT64_MAX - kBlock + 1, {at, kBlock}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*file)->Write(kExtentBytes - kBlock, {at, kBlock}), absl::OkStatus());
  EXPECT_EQ(OpenBlockFile(folder_ / "other", 1000).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(OpenBlockFile(folder_ / "other", 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(BlockFileTest, BelongsToOneAtATime) {
  auto file = OpenBlockFile(path_, kExtentBytes);
  ASSERT_TRUE(file.ok()) << file.status();
  const absl::Status second = OpenBlockFile(path_, kExtentBytes).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(second.message(), HasSubstr(path_));
  file->reset();
  EXPECT_TRUE(OpenBlockFile(path_, kExtentBytes).ok());
}

TEST_F(BlockFileTest, ErrorsNameThePath) {
  const absl::Status missing = OpenBlockFile(folder_ / "no/slab", kExtentBytes).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(missing.message(), HasSubstr("no/slab"));
  EXPECT_FALSE(OpenBlockFile(folder_.path(), kExtentBytes).ok());
}

TEST_F(BlockFileTest, NeitherLinksNorOtherUsersFilesAreWritten) {
  const std::string others = folder_ / "others";
  std::ofstream(others) << "not the tier's";
  ASSERT_EQ(symlink(others.c_str(), path_.c_str()), 0);
  absl::Status refused = OpenBlockFile(path_, kExtentBytes).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), ContainsRegex("/slab: is a symbolic link.*remove it"));
  ASSERT_EQ(unlink(path_.c_str()), 0);

  ASSERT_EQ(link(others.c_str(), path_.c_str()), 0);
  refused = OpenBlockFile(path_, kExtentBytes).status();
  EXPECT_THAT(std::string(refused.message()), ContainsRegex("/slab: has 2 hard links"));
  EXPECT_EQ(Stat(others).st_size, 14);
  ASSERT_EQ(unlink(path_.c_str()), 0);

  ASSERT_EQ(symlink((folder_ / "nothing").c_str(), path_.c_str()), 0);
  EXPECT_FALSE(OpenBlockFile(path_, kExtentBytes).ok());
  EXPECT_NE(access((folder_ / "nothing").c_str(), F_OK), 0) << "the link was followed";
  ASSERT_EQ(unlink(path_.c_str()), 0);

  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file to another user";
  std::ofstream(path_) << "another user's";
  ASSERT_EQ(chown(path_.c_str(), 12345, 12345), 0);
  refused = OpenBlockFile(path_, kExtentBytes).status();
  EXPECT_THAT(std::string(refused.message()),
              ContainsRegex("/slab: owned by user 12345; expected the daemon's user, 0;.*chown"));
  EXPECT_EQ(Stat(path_).st_size, 14);
}

TEST_F(BlockFileTest, OpensFileRelativeToOpenDirectory) {
  const int folder = open(folder_.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_GE(folder, 0);
  EXPECT_TRUE(OpenBlockFile("/elsewhere/slab", kExtentBytes, folder).ok());
  EXPECT_EQ(static_cast<uint64_t>(Stat(path_).st_size), kExtentBytes);
  close(folder);
}

// The limit on file sizes shows that the system was not asked: it would have returned EFBIG. The limit also keeps this
// test from filling the disk.
TEST_F(BlockFileTest, AFullFileSystemIsDetectedBeforeAllocation) {
  ASSERT_TRUE(OpenBlockFile(path_, kExtentBytes).ok());
  const auto blocks = Stat(path_).st_blocks;
  struct statvfs about {};
  ASSERT_EQ(statvfs(folder_.path().c_str(), &about), 0);
  const uint64_t free = uint64_t{about.f_bavail} * about.f_frsize;
  const uint64_t too_much = (free / kExtentBytes << 1) * kExtentBytes + (uint64_t{1} << 40);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit tight{2 * kExtentBytes, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const absl::Status made = OpenBlockFile(folder_ / "large", too_much).status();
  const absl::Status grown = OpenBlockFile(path_, too_much).status();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(made.code(), absl::StatusCode::kResourceExhausted) << made;
  EXPECT_NE(access((folder_ / "large").c_str(), F_OK), 0);
  EXPECT_EQ(grown.code(), absl::StatusCode::kResourceExhausted) << grown;
  EXPECT_THAT(grown.message(), HasSubstr(absl::StrCat(too_much - blocks * 512, " more bytes needed")));
  EXPECT_THAT(std::string(grown.message()), ContainsRegex("has [0-9]+ free"));
  EXPECT_EQ(Stat(path_).st_blocks, blocks);
  EXPECT_EQ(static_cast<uint64_t>(Stat(path_).st_size), kExtentBytes);
}

// A limit on file sizes emulates a full disk: the system refuses at the same point.
TEST_F(BlockFileTest, AFileThatDoesNotFitIsRemoved) {
  ASSERT_TRUE(OpenBlockFile(path_, kExtentBytes).ok());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit tight{2 * kExtentBytes, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const absl::Status made = OpenBlockFile(folder_ / "large", 4 * kExtentBytes).status();
  const absl::Status grown = OpenBlockFile(path_, 4 * kExtentBytes).status();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(made.code(), absl::StatusCode::kResourceExhausted) << made;
  EXPECT_NE(access((folder_ / "large").c_str(), F_OK), 0);
  EXPECT_EQ(grown.code(), absl::StatusCode::kResourceExhausted) << grown;
  EXPECT_EQ(static_cast<uint64_t>(Stat(path_).st_size), kExtentBytes);
}

TEST(BlockFile, AFileSystemWithoutDirectAccessIsRefused) {
  const std::string path = "/dev/shm/ashlar-test-" + std::to_string(getpid());
  const int probe = open(path.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
  if (probe >= 0) close(probe);
  unlink(path.c_str());
  if (probe >= 0) GTEST_SKIP() << "/dev/shm has O_DIRECT";
  const absl::Status status = OpenBlockFile(path, kExtentBytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("O_DIRECT"));
  EXPECT_NE(access(path.c_str(), F_OK), 0) << "the file was left behind";
}

}  // namespace
}  // namespace ashlar::storage
