// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/loop_disk.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

namespace ashlar::integration {
namespace {

bool Run(const std::string& command) {
  return std::system(("PATH=$PATH:/usr/sbin:/sbin; " + command + " >/dev/null 2>&1").c_str()) == 0;
}

bool MountImage(const std::string& folder) {
  return Run("mount -o loop " + folder + "/image " + folder + "/disk");
}

std::string Mount(const std::string& folder, const std::string& size) {
  const std::string image = folder + "/image";
  std::filesystem::create_directory(folder + "/disk");
  if (!Run("truncate -s " + size + " " + image + " && mkfs.ext4 -q -F -m 0 " + image)) return "mkfs.ext4 fails";
  return MountImage(folder) ? "" : "mount -o loop fails";
}

std::string MakeFolder() {
  std::string folder = testing::TempDir() + "ashlar-loop-XXXXXX";
  EXPECT_NE(::mkdtemp(folder.data()), nullptr);
  EXPECT_EQ(::chmod(folder.c_str(), 0755), 0);
  return folder;
}

void Remove(const std::string& folder) {
  ::umount2((folder + "/disk").c_str(), MNT_DETACH);
  std::filesystem::remove_all(folder);
}

}  // namespace

std::string LoopDisk::WhyNot() {
  static const std::string why = []() -> std::string {
    if (::geteuid() != 0) return "only root can mount";
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
      return std::string("no mounts of its own: ") + std::strerror(errno);
    }
    const std::string folder = MakeFolder();
    std::string error = Mount(folder, "8M");
    Remove(folder);
    return error;
  }();
  return why;
}

LoopDisk::LoopDisk(const std::string& size) : folder_(MakeFolder()) {
  EXPECT_EQ(Mount(folder_, size), "");
}

LoopDisk::~LoopDisk() {
  Remove(folder_);
}

void LoopDisk::Fill() {
  const int fd = ::open((path() + "/ballast").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const std::vector<char> bytes(1 << 20, 'x');
  for (size_t size = bytes.size(); fd >= 0 && size > 0;) {
    if (::write(fd, bytes.data(), size) < 0) size /= 2;
  }
  EXPECT_EQ(errno, ENOSPC);
  if (fd >= 0) ::close(fd);
}

void LoopDisk::Empty() {
  EXPECT_EQ(::unlink((path() + "/ballast").c_str()), 0);
}

void LoopDisk::TrimLogs(const std::string& records) {
  for (const auto& entry : std::filesystem::directory_iterator(records)) {
    if (entry.path().extension() != ".log") continue;
    EXPECT_EQ(::truncate(entry.path().c_str(), static_cast<off_t>(entry.file_size())), 0);
  }
}

void LoopDisk::Remount(const std::string& options) {
  EXPECT_TRUE(Run("mount -o remount," + options + " " + path())) << options;
}

void LoopDisk::MountAgain() {
  EXPECT_TRUE(Run("umount " + path()));
  EXPECT_TRUE(MountImage(folder_));
}

}  // namespace ashlar::integration
