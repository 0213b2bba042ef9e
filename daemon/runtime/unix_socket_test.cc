// SPDX-License-Identifier: Apache-2.0
// Unix sockets by path: stale sockets, and the lock that claims a path.
#include "daemon/runtime/unix_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(SocketPaths, AStaleSocketIsRemovedALiveOneIsNot) {
  const std::string path = absl::StrCat("/tmp/ashlard_stale_", getpid(), ".sock");
  const pid_t child = fork();
  if (child == 0) {
    const auto listener = Listen(path, SOCK_SEQPACKET);
    _exit(listener.ok() ? 0 : 1);  // without destructors: the socket's file stays
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_TRUE(std::filesystem::exists(path));
  {
    const auto listener = Listen(path, SOCK_SEQPACKET);
    ASSERT_TRUE(listener.ok()) << listener.status();
    const auto second = Listen(path, SOCK_SEQPACKET);
    EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists) << second.status();
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_FALSE(std::filesystem::exists(path));

  std::FILE* file = std::fopen(path.c_str(), "w");
  std::fclose(file);
  EXPECT_EQ(Listen(path, SOCK_SEQPACKET).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(std::filesystem::exists(path)) << "what is not a socket is never removed";
  unlink(path.c_str());
}

// In a separate process, of a user to whom the kernel applies its limit. Returns 0, or the number of the step that
// failed.
int SendDescriptorsUntilRefused() {
  constexpr rlim_t kFiles = 32;
  const rlimit files{kFiles, kFiles};
  int ends[2];
  if (setrlimit(RLIMIT_NOFILE, &files) != 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    return 1;
  if (getuid() == 0 && setresuid(65534, 65534, 65534) != 0) return 2;
  absl::Status sent;
  rlim_t unread = 0;
  while (unread < 4 * kFiles && (sent = Send(ends[0], "a reply", ends[0])).ok()) ++unread;
  if (!absl::IsResourceExhausted(sent) || unread < kFiles) return 3;
  if (!Send(ends[0], "another").ok()) return 4;  // the connection is unaffected
  if (!absl::IsResourceExhausted(Send(ends[0], "a reply", ends[0]))) return 5;
  for (rlim_t i = 0; i < unread; ++i) {
    const absl::StatusOr<Datagram> read = Receive(ends[1]);
    if (!read.ok() || read->bytes != "a reply" || read->descriptors.size() != 1) return 6;
  }
  return Send(ends[0], "a reply", ends[0]).ok() ? 0 : 7;
}

TEST(Descriptors, AreRefusedBeyondTheUsersLimitUntilRead) {
  const pid_t child = fork();
  if (child == 0) _exit(SendDescriptorsUntilRefused());
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the step of the child that went wrong";
}

class SocketLock : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(folder_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ + "/session.sock"; }
  std::string lock_path() const { return path() + ".lock"; }

  std::string folder_ = "/tmp/ashlard_locked_XXXXXX";
};

TEST_F(SocketLock, WaitsBoundedlyForAnotherDaemonsLock) {
  UniqueFd lock(open(lock_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(flock(lock.get(), LOCK_EX), 0);
  const absl::Status locked = Listen(path(), SOCK_SEQPACKET).status();
  EXPECT_EQ(locked.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(locked.message()), StartsWith(lock_path()));

  std::thread releases([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    lock.Reset();
  });
  EXPECT_TRUE(Listen(path(), SOCK_SEQPACKET).ok());
  releases.join();
  EXPECT_FALSE(std::filesystem::exists(lock_path())) << "the claim leaves no file behind";
}

// A user who can read a folder can lock it. That must not keep a daemon from starting.
TEST_F(SocketLock, AnotherUsersLockOnTheFolderDelaysNoOther) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_EQ(chmod(folder_.c_str(), 0755), 0);
  int ready[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const pid_t other = fork();
  if (other == 0) {
    const bool locked = setuid(65534) == 0 && flock(open(folder_.c_str(), O_RDONLY | O_DIRECTORY), LOCK_EX) == 0;
    if (write(ready[1], locked ? "y" : "n", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char answer = 0;
  ASSERT_EQ(read(ready[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  EXPECT_EQ(Listen(path(), SOCK_SEQPACKET).status(), absl::OkStatus());
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
  for (const int fd : ready) close(fd);
}

TEST_F(SocketLock, RefusesAnotherUsersFile) {
  const auto refused = [&] {
    const absl::Status status = Listen(path(), SOCK_SEQPACKET).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr(lock_path()));
    EXPECT_TRUE(std::filesystem::is_symlink(lock_path()) || std::filesystem::exists(lock_path()));
    unlink(lock_path().c_str());
  };
  ASSERT_EQ(symlink((folder_ + "/elsewhere").c_str(), lock_path().c_str()), 0);
  refused();
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/elsewhere"));
  ASSERT_EQ(mkfifo(lock_path().c_str(), 0600), 0);
  refused();
  const std::string own = folder_ + "/own";
  UniqueFd(open(own.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)).Reset();
  ASSERT_EQ(link(own.c_str(), lock_path().c_str()), 0);
  refused();
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  UniqueFd(open(lock_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)).Reset();
  ASSERT_EQ(chown(lock_path().c_str(), 65534, 65534), 0);
  refused();
}

TEST_F(SocketLock, AWiderModeIsNarrowed) {
  UniqueFd file(open(lock_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(fchmod(file.get(), 0666), 0);
  ASSERT_EQ(Listen(path(), SOCK_SEQPACKET).status(), absl::OkStatus());
  struct stat now {};
  ASSERT_EQ(fstat(file.get(), &now), 0);
  EXPECT_EQ(now.st_mode & 0777, 0600u);
}

}  // namespace
}  // namespace ashlar::daemon
