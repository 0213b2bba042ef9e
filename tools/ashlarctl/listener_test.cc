// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/listener.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tools/ashlarctl/admin_client.h"

namespace ashlar::ctl {
namespace {

using ::testing::HasSubstr;

class ListenerTest : public ::testing::Test {
 protected:
  ListenerTest() {
    char folder[] = "/tmp/ashlar-listener-XXXXXX";
    folder_ = mkdtemp(folder);
  }
  ~ListenerTest() override { std::filesystem::remove_all(folder_); }

  int Listen(const std::string& path, int type) {
    sockaddr_un address{.sun_family = AF_UNIX};
    path.copy(address.sun_path, path.size());
    const int fd = socket(AF_UNIX, type, 0);
    EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(listen(fd, 4), 0);
    return fd;
  }

  // Checks the probe and a call: both must name the path and the same reason.
  void Expect(const std::string& path, absl::StatusCode code, const std::string& why) {
    const absl::Status probed = ListenerOf(path).status();
    EXPECT_EQ(probed.code(), code) << probed;
    v1::StatsReply reply;
    const absl::Status called = AdminClient(path).Stats(v1::StatsRequest(), &reply);
    for (const absl::Status& status : {probed, called}) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(path));
      EXPECT_THAT(std::string(status.message()), HasSubstr(why));
    }
  }

  std::string folder_;
};

TEST_F(ListenerTest, NamesThePathAndItsKind) {
  Expect(folder_ + "/none.sock", absl::StatusCode::kNotFound, "the socket does not exist");
  const std::string plain = folder_ + "/plain";
  std::ofstream(plain) << "x";
  Expect(plain, absl::StatusCode::kInvalidArgument, "not a socket");
  const std::string left = folder_ + "/left.sock";
  close(Listen(left, SOCK_STREAM));
  Expect(left, absl::StatusCode::kUnavailable, "has exited");
  const std::string session = folder_ + "/session.sock";
  const int fd = Listen(session, SOCK_SEQPACKET);
  Expect(session, absl::StatusCode::kInvalidArgument, "wrong socket type");
  close(fd);
  EXPECT_TRUE(absl::IsInvalidArgument(ListenerOf(folder_ + std::string(200, 'x')).status()));
  const std::string own = folder_ + "/own.sock";
  const int listening = Listen(own, SOCK_STREAM);
  EXPECT_EQ(ListenerOf(own).value(), getpid());
  close(listening);
}

TEST_F(ListenerTest, MissingPermissionIsNotAMissingDaemon) {
  const std::string path = folder_ + "/admin.sock";
  const int fd = Listen(path, SOCK_STREAM);
  chmod(path.c_str(), 0);
  chmod(folder_.c_str(), 0755);
  const bool root = geteuid() == 0;
  if (root) {
    ASSERT_EQ(seteuid(65534), 0);
  }
  Expect(path, absl::StatusCode::kPermissionDenied, "permission denied; run ashlarctl as root");
  if (root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  close(fd);
}

}  // namespace
}  // namespace ashlar::ctl
