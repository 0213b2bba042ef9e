// SPDX-License-Identifier: Apache-2.0
// A daemon whose stderr is a pipe without a reader, and a daemon whose log a tenant tries to fill.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "tests/integration/daemon_process.h"
#include "tests/integration/raw_session.h"
#include "tests/integration/victim.h"

namespace ashlar::integration {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::HasSubstr;

class UnreadLog : public testing::Test {
 protected:
  static constexpr uint32_t kGraceSeconds = 1;

  UnreadLog() {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    read_end_ = ends[0];
    write_end_ = ends[1];
    ::fcntl(write_end_, F_SETPIPE_SZ, 4096);
    daemon_ = std::make_unique<DaemonProcess>(DaemonOptions{.drain_seconds = kGraceSeconds, .log = write_end_});
  }
  ~UnreadLog() override {
    ::close(write_end_);
    ::close(read_end_);
  }

  void OpenAndCloseSessions(int count) {
    for (int i = 0; i < count; ++i) ASSERT_FALSE(RawSession(daemon_->client_options()).Greet().empty());
  }
  bool PipeIsFull() const {
    struct pollfd end = {.fd = write_end_, .events = POLLOUT, .revents = 0};
    return ::poll(&end, 1, 0) == 0;
  }
  milliseconds Terminate() {
    const auto begun = steady_clock::now();
    daemon_->Signal(SIGTERM);
    EXPECT_EQ(daemon_->Wait(), 0);
    return std::chrono::duration_cast<milliseconds>(steady_clock::now() - begun);
  }

  int read_end_ = -1, write_end_ = -1;
  std::unique_ptr<DaemonProcess> daemon_;
};

TEST_F(UnreadLog, BlocksNeitherCallsNorTheStop) {
  const size_t before = daemon_->peak_bytes();
  {
    Victim victim(daemon_->client_options());
    OpenAndCloseSessions(60);
    ASSERT_TRUE(Eventually([this] { return PipeIsFull(); }));
    OpenAndCloseSessions(500);
    victim.ExpectServed();
    EXPECT_THAT(daemon_->Http("/healthz"), HasSubstr(" 200 "));
    EXPECT_TRUE(PipeIsFull());
    EXPECT_LE(daemon_->peak_bytes(), before + (size_t{64} << 20));
  }
  EXPECT_LE(Terminate(), std::chrono::seconds(kGraceSeconds + 2));
}

TEST_F(UnreadLog, ATenantCannotFillIt) {
  constexpr int kSessions = 1000;
  std::string log;
  std::thread reader([&] {
    char bytes[4096];
    for (ssize_t got; (got = ::read(read_end_, bytes, sizeof bytes)) > 0;) log.append(bytes, got);
  });
  OpenAndCloseSessions(kSessions);
  EXPECT_TRUE(Eventually(
      [&] { return daemon_->Http("/metrics").find("ashlar_log_lines_suppressed_total 1") != std::string::npos; }));
  Terminate();
  ::close(write_end_);
  reader.join();
  EXPECT_LE(std::ranges::count(log, '\n'), 300) << log.substr(0, 4096);
  EXPECT_THAT(log, HasSubstr("log lines suppressed by the rate limit of=\"session opened\" tenant="));
  EXPECT_THAT(log, HasSubstr("log lines suppressed by the rate limit of=\"session closed\" tenant="));
}

}  // namespace
}  // namespace ashlar::integration
