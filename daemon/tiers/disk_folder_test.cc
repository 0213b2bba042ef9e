// SPDX-License-Identifier: Apache-2.0
#include "daemon/tiers/disk_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

namespace ashlar::daemon {
namespace {

namespace fs = std::filesystem;

class DiskFolderTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(parent_.data()), nullptr); }
  void TearDown() override { fs::remove_all(parent_); }

  std::string folder() const { return parent_ + "/a/ssd"; }
  static mode_t ModeOf(const std::string& path) {
    struct stat info {};
    EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
    return info.st_mode & 0777;
  }
  static void Write(const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
    ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  }
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder())) names.insert(entry.path().filename());
    return names;
  }

  std::string parent_ = "/tmp/ashlard_folder_XXXXXX";
};

TEST_F(DiskFolderTest, CreatesPrivateFolder) {
  ASSERT_EQ(OpenPrivate(folder()).status(), absl::OkStatus());
  EXPECT_EQ(ModeOf(folder()), 0700u);
  EXPECT_EQ(ModeOf(parent_ + "/a"), 0700u);
}

TEST_F(DiskFolderTest, NarrowsModesOfOlderFiles) {
  const std::string records = RecordsFolder(folder()), damaged = folder() + "/records.damaged-20260101T000000Z";
  for (const std::string& made : {folder(), records, damaged}) {
    fs::create_directories(made);
    ASSERT_EQ(chmod(made.c_str(), 0755), 0);
  }
  const std::string files[] = {folder() + "/slab", records + "/000004.log", records + "/CURRENT", damaged + "/CURRENT"};
  for (const std::string& file : files) Write(file, "secret");
  ASSERT_EQ(OpenPrivate(folder()).status(), absl::OkStatus());
  for (const std::string& made : {folder(), records, damaged}) EXPECT_EQ(ModeOf(made), 0700u) << made;
  for (const std::string& file : files) EXPECT_EQ(ModeOf(file), 0600u) << file;
}

// Nothing outside the folder is read, written or narrowed through a name in it.
TEST_F(DiskFolderTest, ALinkIsRefusedByName) {
  const std::string records = RecordsFolder(folder()), damaged = folder() + "/records.damaged-20260101T000000Z";
  fs::create_directories(records);
  fs::create_directories(damaged);
  const std::string others = parent_ + "/others", another = parent_ + "/another";
  Write(others, "not the tier's");
  fs::create_directories(another);
  for (const std::string& link :
       {folder() + "/slab", folder() + "/forgotten", records + "/CURRENT", damaged + "/LOCK"}) {
    fs::create_symlink(others, link);
    const absl::Status refused = OpenPrivate(folder()).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << link;
    EXPECT_THAT(std::string(refused.message()), ::testing::StartsWith(link + ": is a symbolic link"));
    fs::remove(link);
  }
  fs::remove(records);
  fs::create_directory_symlink(another, records);
  EXPECT_THAT(std::string(OpenPrivate(folder()).status().message()),
              ::testing::StartsWith(records + ": is a symbolic link"));
  EXPECT_EQ(ModeOf(others), 0644u);
}

TEST_F(DiskFolderTest, AWorldWritableFolderIsRefusedByName) {
  fs::create_directories(folder());
  ASSERT_EQ(chmod(folder().c_str(), 0777), 0);
  const absl::Status refused = OpenPrivate(folder()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      refused.message(),
      folder() + ": other users can write to it; expected mode 0700; check its contents, then chmod or remove it");
  EXPECT_EQ(ModeOf(folder()), 0777u);
}

TEST_F(DiskFolderTest, RefusesFilesOfOtherUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file to another user";
  const std::string records = RecordsFolder(folder());
  fs::create_directories(records);
  Write(folder() + "/slab", "");
  Write(records + "/CURRENT", "");
  for (const std::string& path : {folder(), folder() + "/slab", records, records + "/CURRENT"}) {
    ASSERT_EQ(chown(path.c_str(), 12345, 12345), 0);
    const absl::Status refused = OpenPrivate(folder()).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()),
                ::testing::StartsWith(path + ": owned by user 12345; expected the daemon's user, 0; "));
    ASSERT_EQ(chown(path.c_str(), 0, 0), 0);
  }
  EXPECT_EQ(OpenPrivate(folder()).status(), absl::OkStatus());
}

TEST_F(DiskFolderTest, KeepsLatestRenamedDatabases) {
  const auto damage = [&](const std::string& what) {
    fs::create_directories(RecordsFolder(folder()));
    Write(RecordsFolder(folder()) + "/what", what);
  };
  for (int i = 0; i < 4; ++i) {
    damage(std::to_string(i));
    const auto name = QuarantineRecords(folder(), 1'700'000'000 + i / 2);  // two of one second
    ASSERT_TRUE(name.ok()) << name.status();
    std::string what;
    std::ifstream(*name + "/what") >> what;
    EXPECT_EQ(what, std::to_string(i));
  }
  EXPECT_THAT(Names(),
              ::testing::ElementsAre("records.damaged-20231114T221321Z", "records.damaged-20231114T221321Z-1"));
  EXPECT_EQ(QuarantineRecords(folder(), 1'700'000'000).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ashlar::daemon
