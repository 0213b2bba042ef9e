// SPDX-License-Identifier: Apache-2.0
#include "daemon/threads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/runtime/named_thread.h"
#include "kernels/host/thread_pool.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;

class Threads : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(mkdtemp(root_.data()), nullptr);
    config_.add_tenants();
    config_.mutable_workers()->set_threads(10);
    config_.mutable_ssd()->set_threads(5);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text << "\n";
  }

  std::string root_ = "/tmp/ashlar_threads_XXXXXX";
  v1::Config config_;
};

TEST_F(Threads, CountsConfiguredThreads) {
  const uint64_t few = ThreadsNeeded(config_);
  config_.mutable_workers()->set_threads(20);
  EXPECT_EQ(ThreadsNeeded(config_), few + 10);
  config_.mutable_ssd()->set_threads(8);
  EXPECT_EQ(ThreadsNeeded(config_), few + 13);
  config_.add_tenants();
  EXPECT_EQ(ThreadsNeeded(config_), few + 13 + 2) << "a reader, and a spare thread";
  config_.mutable_cluster()->add_peers();
  EXPECT_GT(ThreadsNeeded(config_), few + 15);
}

TEST_F(Threads, RefusalNamesLimit) {
  EXPECT_TRUE(CheckThreads(config_, root_).ok()) << "no limit that can be read";
  const uint64_t needed = ThreadsNeeded(config_);
  const auto with = [&](const std::string& path, uint64_t limit) {
    Write(path, absl::StrCat(limit));
    return CheckThreads(config_, root_);
  };
  Write("/proc/self/cgroup", "3:pids:/outer/inner\n0::/unit");
  Write("/proc/loadavg", "0.00 0.01 0.05 2/1000 4711");
  for (const std::string folder : {"/sys/fs/cgroup/unit", "/sys/fs/cgroup/pids/outer"}) {
    Write(folder + "/pids.current", "7");
    EXPECT_TRUE(with(folder + "/pids.max", needed + 7).ok());
    const absl::Status refused = with(folder + "/pids.max", needed + 6);
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr(absl::StrCat("pids.max in ", root_, folder, ") is ", needed + 6)));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("of which 7 are in use"));
    Write(folder + "/pids.max", "max");
  }
  EXPECT_TRUE(with("/proc/sys/kernel/threads-max", needed + 1000).ok());
  EXPECT_THAT(std::string(with("/proc/sys/kernel/threads-max", needed + 999).message()),
              HasSubstr("kernel.threads-max"));
}

TEST_F(Threads, TheUsersLimitCountsAllItsProcesses) {
  const uint64_t needed = ThreadsNeeded(config_);
  Write("/proc/self/status", "Name:\ta\nUid:\t1000\t1000\t1000\t1000\nThreads:\t1\nCapEff:\t0000000000000000");
  Write("/proc/12/status", "Name:\ta\nUid:\t1000\t1000\t1000\t1000\nThreads:\t30");
  Write("/proc/13/status", "Name:\tb\nUid:\t1001\t1001\t1001\t1001\nThreads:\t500");
  const auto with = [&](uint64_t limit) {
    const pid_t child = fork();
    if (child == 0) {
      const rlimit user{limit, limit};
      setrlimit(RLIMIT_NPROC, &user);
      const absl::Status status = CheckThreads(config_, root_);
      _exit(status.ok() ? 0 : absl::StrCat(status.message()).find("RLIMIT_NPROC") != std::string::npos ? 1 : 2);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  EXPECT_EQ(with(needed + 30), 0);
  EXPECT_EQ(with(needed + 29), 1);
  Write("/proc/self/status", "Name:\ta\nUid:\t0\t0\t0\t0\nThreads:\t1\nCapEff:\t0000000000000000");
  EXPECT_EQ(with(needed + 29), 0) << "the kernel exempts root";
}

// In a process of a user that has no thread left.
template <typename Work>
int WithoutThreads(Work work) {
  const pid_t child = fork();
  if (child == 0) {
    const rlimit user{1, 1};
    if (setrlimit(RLIMIT_NPROC, &user) != 0 || setuid(65529) != 0) _exit(100);
    work();
    _exit(0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_F(Threads, FailedThreadStartExitsWithMessage) {
  if (getuid() != 0) GTEST_SKIP() << "only root can be a user of no threads";
  EXPECT_EQ(WithoutThreads([] { NamedThread("metadata", [] {}).join(); }), EXIT_FAILURE);
}

TEST_F(Threads, APoolWorksWithFewerThreads) {
  if (getuid() != 0) GTEST_SKIP() << "only root can be a user of no threads";
  EXPECT_EQ(WithoutThreads([] {
              kernels::ThreadPool pool(8);
              int sum = 0;
              pool.Run(
                  10, [](void* context, int64_t i) { *static_cast<int*>(context) += static_cast<int>(i); }, &sum);
              if (pool.Size() != 1 || sum != 45) _exit(2);
            }),
            0);
}

}  // namespace
}  // namespace ashlar::daemon
