// SPDX-License-Identifier: Apache-2.0
// A reload whose configuration is not a regular file fails at once, and blocks no later reload.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tests/integration/daemon_process.h"
#include "tests/integration/victim.h"

namespace ashlar::integration {
namespace {

using std::chrono::steady_clock;
using testing::HasSubstr;

class ReloadOf : public testing::Test {
 protected:
  // Replaces the configuration by `put`, reloads, and expects a refusal within a second.
  void ExpectRefused(const std::function<void()>& put, const std::string& why) {
    ASSERT_EQ(std::rename(config_.c_str(), kept_.c_str()), 0);
    put();
    daemon_.Signal(SIGHUP);
    EXPECT_TRUE(
        Eventually([&] { return daemon_.log().find("cannot read " + config_ + ": " + why) != std::string::npos; },
                   std::chrono::seconds(1)));
    std::filesystem::remove(config_);
    ASSERT_EQ(std::rename(kept_.c_str(), config_.c_str()), 0);
  }

  DaemonProcess daemon_{DaemonOptions{.drain_seconds = 1}};
  const std::string config_ = daemon_.directory() + "/config.yaml", kept_ = config_ + ".kept";
};

TEST_F(ReloadOf, NonRegularFileIsRefusedAtOnce) {
  Victim victim(daemon_.client_options());
  const size_t before = daemon_.peak_bytes();
  ExpectRefused([&] { ASSERT_EQ(mkfifo(config_.c_str(), 0600), 0); }, "it is a FIFO");
  ExpectRefused([&] { std::filesystem::create_symlink("/dev/zero", config_); }, "it is a device");
  ExpectRefused(
      [&] {
        std::ofstream(config_).close();
        std::filesystem::resize_file(config_, uint64_t{1} << 40);  // a sparse file
      },
      "larger than");
  EXPECT_LE(daemon_.peak_bytes(), before + (size_t{64} << 20));
  victim.ExpectServed();

  std::ofstream(config_, std::ios::app) << "log:\n  level: debug\n";
  daemon_.Signal(SIGHUP);
  EXPECT_TRUE(Eventually([&] { return daemon_.log().find("configuration reloaded") != std::string::npos; }));
  const auto begun = steady_clock::now();
  EXPECT_EQ(daemon_.Terminate(), 0);
  EXPECT_LE(steady_clock::now() - begun, std::chrono::seconds(3));
}

}  // namespace
}  // namespace ashlar::integration
