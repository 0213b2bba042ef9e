// SPDX-License-Identifier: Apache-2.0
#include "proto/regular_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

namespace ashlar {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class RegularFile : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(folder_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  std::string folder_ = "/tmp/ashlar_regular_file_XXXXXX";
};

TEST_F(RegularFile, IsReadUpToLimit) {
  std::ofstream(Path("file")) << "12345";
  EXPECT_EQ(*ReadRegularFile("ca_file", Path("file"), 5), "12345");
  const absl::Status large = ReadRegularFile("ca_file", Path("file"), 4).status();
  EXPECT_EQ(large.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(large.message(), "ca_file: cannot read " + Path("file") + ": larger than 4 bytes; give a smaller file");

  std::filesystem::create_symlink("file", Path("link"));  // as in configuration mounted by Kubernetes
  EXPECT_EQ(*ReadRegularFile("", Path("link"), 5), "12345");
  std::ofstream(Path("empty"));
  EXPECT_EQ(*ReadRegularFile("", Path("empty"), 5), "");
}

TEST_F(RegularFile, AMissingFileIsNamed) {
  const absl::Status missing = ReadRegularFile("key_file", Path("none"), 5).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), StartsWith("key_file: cannot read " + Path("none") + ": "));
  EXPECT_THAT(std::string(ReadRegularFile("", Path("none"), 5).status().message()),
              StartsWith("cannot read " + Path("none")));
}

// None of these may block the reader, or fill its memory.
TEST_F(RegularFile, OtherFilesAreRefusedAtOnce) {
  ASSERT_EQ(mkfifo(Path("fifo").c_str(), 0600), 0);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, Path("socket").c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const std::pair<std::string, std::string> refused[] = {{Path("fifo"), "it is a FIFO; give a regular file"},
                                                         {folder_, "it is a folder"},
                                                         {"/dev/zero", "it is a device"},
                                                         {Path("socket"), Path("socket")}};
  for (const auto& [path, why] : refused) {
    const absl::Status status = ReadRegularFile("config", path, 1 << 20).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), StartsWith("config: cannot read " + path + ": "));
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  }
  close(listener);
}

}  // namespace
}  // namespace ashlar
