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

TEST_F(DiskFolderTest, IsMadeForItsUserAlone) {
  ASSERT_EQ(MakePrivate(folder()), absl::OkStatus());
  EXPECT_EQ(ModeOf(folder()), 0700u);
  EXPECT_EQ(ModeOf(parent_ + "/a"), 0700u);
}

TEST_F(DiskFolderTest, WhatAnOlderDaemonLeftIsNarrowed) {
  const std::string records = RecordsFolder(folder()), damaged = folder() + "/records.damaged-20260101T000000Z";
  for (const std::string& made : {folder(), records, damaged}) {
    fs::create_directories(made);
    ASSERT_EQ(chmod(made.c_str(), 0755), 0);
  }
  const std::string files[] = {folder() + "/slab", records + "/000004.log", records + "/CURRENT", damaged + "/CURRENT"};
  for (const std::string& file : files) Write(file, "secret");
  const std::string others = parent_ + "/others";
  Write(others, "not the tier's");
  fs::create_symlink(others, records + "/link");
  ASSERT_EQ(MakePrivate(folder()), absl::OkStatus());
  for (const std::string& made : {folder(), records, damaged}) EXPECT_EQ(ModeOf(made), 0700u) << made;
  for (const std::string& file : files) EXPECT_EQ(ModeOf(file), 0600u) << file;
  EXPECT_EQ(ModeOf(others), 0644u) << "links are not followed";
}

TEST_F(DiskFolderTest, OfWhatIsSetAsideTheLatestStays) {
  const auto damage = [&](const std::string& what) {
    fs::create_directories(RecordsFolder(folder()));
    Write(RecordsFolder(folder()) + "/what", what);
  };
  for (int i = 0; i < 4; ++i) {
    damage(std::to_string(i));
    const auto name = SetAside(folder(), 1'700'000'000 + i / 2);  // two of one second
    ASSERT_TRUE(name.ok()) << name.status();
    std::string what;
    std::ifstream(*name + "/what") >> what;
    EXPECT_EQ(what, std::to_string(i));
  }
  EXPECT_THAT(Names(),
              ::testing::ElementsAre("records.damaged-20231114T221321Z", "records.damaged-20231114T221321Z-1"));
  EXPECT_EQ(SetAside(folder(), 1'700'000'000).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace ashlar::daemon
