// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/network_namespace.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace ashlar::integration {
namespace {

int OwnNamespace() {
  return ::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
}

bool RaiseLoopback() {
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct ifreq request {};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP;
  const bool up = ::ioctl(fd, SIOCSIFFLAGS, &request) == 0;
  ::close(fd);
  return up;
}

}  // namespace

NetworkNamespace::NetworkNamespace() {
  const int before = OwnNamespace();
  if (before < 0 || ::unshare(CLONE_NEWNET) != 0) {
    ADD_FAILURE() << "no network namespace: " << std::strerror(errno);
  } else {
    fd_ = OwnNamespace();
    EXPECT_TRUE(RaiseLoopback()) << std::strerror(errno);
    if (::setns(before, CLONE_NEWNET) != 0) ADD_FAILURE() << "no way back: " << std::strerror(errno);
  }
  ::close(before);
}

NetworkNamespace::~NetworkNamespace() {
  if (fd_ >= 0) ::close(fd_);
}

std::string NetworkNamespace::path() const {
  return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(fd_);
}

InNetworkNamespace::InNetworkNamespace(int fd) {
  if (fd < 0) return;
  before_ = OwnNamespace();
  EXPECT_EQ(::setns(fd, CLONE_NEWNET), 0) << std::strerror(errno);
}

InNetworkNamespace::~InNetworkNamespace() {
  if (before_ < 0) return;
  EXPECT_EQ(::setns(before_, CLONE_NEWNET), 0) << std::strerror(errno);
  ::close(before_);
}

bool LiveInNetworkNamespace(int fd) {
  return ::setns(fd, CLONE_NEWNET) == 0 && ::unshare(CLONE_NEWNS) == 0 &&
         ::mount("none", "/", nullptr, MS_REC | MS_SLAVE, nullptr) == 0 &&
         ::mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr) == 0;
}

}  // namespace ashlar::integration
