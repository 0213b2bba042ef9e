// SPDX-License-Identifier: Apache-2.0
// A sandboxed process can do what a daemon does, and nothing else. Each test drops rights in a separate process.
#include "daemon/security/sandbox.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/landlock.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {
namespace {

class SandboxTest : public ::testing::Test {
 protected:
  SandboxTest() {
    std::string name = "/tmp/ashlar_sandbox_XXXXXX";
    if (mkdtemp(name.data()) == nullptr) std::abort();
    folder_ = name;
    std::filesystem::create_directory(folder_ + "/mine");
    std::filesystem::create_directory(folder_ + "/others");
  }
  ~SandboxTest() override { std::filesystem::remove_all(folder_); }

  // Runs `body` in a child. Returns 0 if all is right, otherwise the line of the failure.
  static int InChild(const std::function<int()>& body) {
    const pid_t child = fork();
    if (child == 0) _exit(body());
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
  }
  static bool HasLandlock() {
    return syscall(SYS_landlock_create_ruleset, nullptr, 0, LANDLOCK_CREATE_RULESET_VERSION) >= 1;
  }
  static bool Makes(const std::string& path) {
    const int file = open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (file >= 0) close(file);
    return file >= 0;
  }
  std::string folder_;
};

#define ASHLAR_EXPECT(condition)                                                   \
  if (!(condition)) {                                                              \
    std::fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #condition, errno); \
    return 1;                                                                      \
  }

TEST_F(SandboxTest, FilesOutsideItsFoldersAreRefused) {
  if (!HasLandlock()) GTEST_SKIP() << "this kernel has no landlock";
  EXPECT_EQ(InChild([this] {
              const int open_before = open((folder_ + "/others").c_str(), O_DIRECTORY | O_RDONLY | O_CLOEXEC);
              const auto restricted =
                  RestrictFiles({.read = {"/proc", folder_ + "/not there"}, .write = {folder_ + "/mine"}});
              ASHLAR_EXPECT(restricted.ok() && *restricted);
              ASHLAR_EXPECT(Makes(folder_ + "/mine/file"));
              ASHLAR_EXPECT(mkdir((folder_ + "/mine/more").c_str(), 0700) == 0);
              ASHLAR_EXPECT(rename((folder_ + "/mine/file").c_str(), (folder_ + "/mine/more/file").c_str()) == 0);
              ASHLAR_EXPECT(unlink((folder_ + "/mine/more/file").c_str()) == 0);
              ASHLAR_EXPECT(open("/proc/self/status", O_RDONLY | O_CLOEXEC) >= 0);
              ASHLAR_EXPECT(!Makes(folder_ + "/others/file") && errno == EACCES);
              ASHLAR_EXPECT(open("/etc/passwd", O_RDONLY | O_CLOEXEC) < 0 && errno == EACCES);
              ASHLAR_EXPECT(open("/", O_DIRECTORY | O_RDONLY | O_CLOEXEC) < 0 && errno == EACCES);
              ASHLAR_EXPECT(openat(open_before, "file", O_CREAT | O_RDWR | O_CLOEXEC, 0600) < 0 && errno == EACCES);
              ASHLAR_EXPECT(symlink("/etc/passwd", (folder_ + "/mine/link").c_str()) < 0 && errno == EACCES);
              ASHLAR_EXPECT(execl("/bin/true", "true", nullptr) < 0 && errno == EACCES);
              // Memory files are in no folder: engines' regions are opened through /proc.
              const int memory = memfd_create("region", MFD_CLOEXEC);
              const std::string again = "/proc/self/fd/" + std::to_string(memory);
              ASHLAR_EXPECT(memory >= 0 && open(again.c_str(), O_RDWR | O_CLOEXEC) >= 0);
              bool in_thread = true;
              std::thread([&] { in_thread = Makes(folder_ + "/others/file"); }).join();
              ASHLAR_EXPECT(!in_thread);
              return 0;
            }),
            0);
}

TEST_F(SandboxTest, CallsThatADaemonNeverMakesAreRefusedOnAllThreads) {
  const absl::Status able = [] {
    absl::Status status;
#ifndef ASHLAR_SECCOMP
    status = RestrictCalls();
#endif
    return status;
  }();
  if (absl::IsUnimplemented(able)) GTEST_SKIP() << able;
  EXPECT_EQ(InChild([this] {
              bool restricted = false, in_thread = true;
              std::thread before([&] {
                while (!__atomic_load_n(&restricted, __ATOMIC_ACQUIRE)) sched_yield();
                in_thread = unshare(CLONE_NEWUSER) == 0 || errno != EPERM;
              });
              ASHLAR_EXPECT(RestrictFiles({.read = {"/"}, .write = {folder_}}).ok());
              const absl::Status calls = RestrictCalls();
              if (!calls.ok()) std::fprintf(stderr, "%s\n", calls.ToString().c_str());
              ASHLAR_EXPECT(calls.ok());
              __atomic_store_n(&restricted, true, __ATOMIC_RELEASE);
              before.join();
              ASHLAR_EXPECT(!in_thread);
              ASHLAR_EXPECT(execl("/bin/true", "true", nullptr) < 0 && errno == EPERM);
              ASHLAR_EXPECT(fork() < 0 && errno == EPERM);
              pid_t child = 0;
              char* const words[] = {const_cast<char*>("true"), nullptr};
              ASHLAR_EXPECT(posix_spawn(&child, "/bin/true", nullptr, nullptr, words, environ) != 0);
              ASHLAR_EXPECT(ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) < 0 && errno == EPERM);
              ASHLAR_EXPECT(syscall(SYS_bpf, 0, nullptr, 0) < 0 && errno == EPERM);
              ASHLAR_EXPECT(syscall(SYS_mount, "none", "/tmp", "tmpfs", 0, nullptr) < 0 && errno == EPERM);
              ASHLAR_EXPECT(setresuid(1, 1, 1) < 0 && errno == EPERM);
              ASHLAR_EXPECT(socket(AF_PACKET, SOCK_RAW, 0) < 0 && errno == EPERM);
              ASHLAR_EXPECT(socket(AF_VSOCK, SOCK_STREAM, 0) < 0 && errno == EPERM);
              // The kernel reads only the lower half of the register.
              constexpr long kUpper = long{1} << 32;
              ASHLAR_EXPECT(syscall(SYS_socket, kUpper | AF_PACKET, SOCK_RAW, 0) < 0 && errno == EPERM);
              ASHLAR_EXPECT(syscall(SYS_socket, kUpper | AF_ALG, SOCK_SEQPACKET, 0) < 0 && errno == EPERM);
              ASHLAR_EXPECT(syscall(SYS_clone, kUpper | SIGCHLD, nullptr, nullptr, nullptr, 0) < 0 && errno == EPERM);
              // Calls that the daemon continues to make.
              ASHLAR_EXPECT(syscall(SYS_socket, kUpper | AF_UNIX, SOCK_STREAM, 0) >= 0);
              ASHLAR_EXPECT(socket(AF_UNIX, SOCK_STREAM, 0) >= 0);
              ASHLAR_EXPECT(socket(AF_INET, SOCK_STREAM, 0) >= 0);
              bool ran = false;
              std::thread([&] { ran = true; }).join();
              ASHLAR_EXPECT(ran);
              const int memory = memfd_create("arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
              ASHLAR_EXPECT(memory >= 0 && ftruncate(memory, 1 << 20) == 0);
              ASHLAR_EXPECT(mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0) != MAP_FAILED);
              ASHLAR_EXPECT(Makes(folder_ + "/file"));
              return 0;
            }),
            0);
}

TEST(PathsFor, ReturnsConfiguredPaths) {
  v1::Config config;
  config.mutable_listen()->set_rpc_socket("/run/a/rpc.sock");
  config.mutable_listen()->set_admin_socket("/run/b/admin.sock");
  config.mutable_events()->set_zmq_address("ipc:///run/h/events.sock");
  config.mutable_events()->set_zmq_replay_address("tcp://127.0.0.1:5558");
  config.mutable_ssd()->set_folder("/var/lib/c");
  config.mutable_log()->set_audit_file("/var/log/d/audit");
  config.mutable_cluster()->mutable_tls()->set_key_file("/keys/e/tls.key");
  config.mutable_cluster()->mutable_etcd()->set_password_file("/keys/f/password");
  const SandboxPaths paths = PathsFor(config, "/conf/g/ashlard.yaml");
  for (const char* path : {"/run/a", "/run/b", "/run/h", "/var/lib/c", "/var/log/d"}) {
    EXPECT_EQ(std::ranges::count(paths.write, path), 1) << path;
  }
  for (const char* path : {"/keys/e", "/keys/f", "/conf/g", "/proc", "/usr"}) {
    EXPECT_EQ(std::ranges::count(paths.read, path), 1) << path;
    EXPECT_EQ(std::ranges::count(paths.write, path), 0) << path;
  }
}

}  // namespace
}  // namespace ashlar::daemon
