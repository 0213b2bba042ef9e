// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/default_socket.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

namespace ashlar::ctl {
namespace {

TEST(DefaultSocket, TheEnvironmentComesFirst) {
  setenv("ASHLAR_TEST_SOCKET", "/somewhere/else.sock", 1);
  EXPECT_EQ(DefaultSocket("ASHLAR_TEST_SOCKET", "none.sock"), "/somewhere/else.sock");
  setenv("ASHLAR_TEST_SOCKET", "", 1);
  EXPECT_NE(DefaultSocket("ASHLAR_TEST_SOCKET", "none.sock"), "");
  unsetenv("ASHLAR_TEST_SOCKET");
}

TEST(DefaultSocket, UsersOtherThanRootHaveAFolderOfTheirOwn) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  setenv("XDG_RUNTIME_DIR", "/run/user/7", 1);
  EXPECT_EQ(DefaultSocket("ASHLAR_TEST_SOCKET", "none.sock"), "/run/ashlar/none.sock");
  const pid_t child = fork();
  if (child == 0) {
    bool right = seteuid(65533) == 0;
    right = right && DefaultSocket("ASHLAR_TEST_SOCKET", "none.sock") == "/run/user/7/ashlar/none.sock";
    setenv("XDG_RUNTIME_DIR", "relative", 1);
    right = right && DefaultSocket("ASHLAR_TEST_SOCKET", "none.sock") == "/run/ashlar/none.sock";
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  unsetenv("XDG_RUNTIME_DIR");
}

}  // namespace
}  // namespace ashlar::ctl
