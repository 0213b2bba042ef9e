// SPDX-License-Identifier: Apache-2.0
// Fixtures of this folder's tests: memory files, descriptors of processes, a listening socket.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>

#include "client/session/descriptor.h"

namespace ashlar::internal {

inline Descriptor MakeMemfd(uint64_t bytes, int seals) {
  Descriptor fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 || ::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) {
    return Descriptor();
  }
  return fd;
}

inline Descriptor Pidfd(pid_t pid) {
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// A listening socket in a temporary directory.
class Listener {
 public:
  Listener() : fd_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    std::string pattern = testing::TempDir() + "ashlar-XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/socket";
    struct sockaddr_un address {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    EXPECT_EQ(::bind(fd_.get(), reinterpret_cast<struct sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(fd_.get(), 4), 0);
  }
  ~Listener() { std::filesystem::remove_all(directory_); }

  const std::string& path() const { return path_; }
  Descriptor Accept() { return Descriptor(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC)); }

 private:
  Descriptor fd_;
  std::string directory_, path_;
};

}  // namespace ashlar::internal
