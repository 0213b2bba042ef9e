// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>

#include "ashlar/v1/peer.pb.h"
#include "daemon/runtime/log_limiter.h"

namespace ashlar::daemon {
namespace {

TEST(Log, TextStaysOnOneLine) {
  EXPECT_EQ(FormatLogLine(false, "session opened", {{"pid", 12}, {"client", "libashlar/1"}}),
            "session opened pid=12 client=libashlar/1");
  EXPECT_EQ(FormatLogLine(false, "m", {{"client", "a b\n\"c\" x=1"}}), "m client=\"a b\\n\\\"c\\\" x=1\"");
  EXPECT_EQ(FormatLogLine(false, "m", {{"client", "a tenant's \\'"}}), "m client=\"a tenant's \\\\'\"");
  EXPECT_EQ(FormatLogLine(false, "m", {{"client", ""}}), "m client=\"\"");
  EXPECT_EQ(FormatLogLine(false, "m", {{"client", "\xff"}}), "m client=\"\\xff\"");
}

TEST(Log, JsonParsesAndKeepsNumbers) {
  const std::string line =
      FormatLogLine(true, "say \"hi\"", {{"pid", -3}, {"client", "a\nb\xff"}, {"bytes", uint64_t{1} << 40}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const nlohmann::json parsed = nlohmann::json::parse("{" + line + "}");
  EXPECT_EQ(parsed["message"], "say \"hi\"");
  EXPECT_EQ(parsed["pid"], -3);
  EXPECT_EQ(parsed["bytes"], int64_t{1} << 40);
  EXPECT_EQ(parsed["client"].get<std::string>().substr(0, 3), "a\nb");
}

TEST(Log, InvalidUtf8DropsNoLine) {
  ConfigureLog("info", "json");
  testing::internal::CaptureStderr();
  v1::PeerGreeting greeting;
  EXPECT_FALSE(greeting.ParseFromString("\x1a\x01\xff"));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  ConfigureLog("debug", "text");
  testing::internal::CaptureStderr();
  EXPECT_FALSE(greeting.ParseFromString("\x1a\x01\xff"));
  EXPECT_NE(testing::internal::GetCapturedStderr().find(" debug message from protobuf text="), std::string::npos);
  ConfigureLog("info", "text");
}

TEST(LogLimiter, LinesPerMessageAndTenantAreBounded) {
  LogLimiter limiter;
  const LogLimiter::Time begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(limiter.EndWindow(begin).empty());
  for (uint64_t i = 0; i < LogLimiter::kLines; ++i) {
    EXPECT_TRUE(limiter.Admit(LogLevel::kInfo, "session opened", "alpha"));
  }
  EXPECT_FALSE(limiter.Admit(LogLevel::kInfo, "session opened", "alpha"));
  EXPECT_FALSE(limiter.Admit(LogLevel::kWarning, "session opened", "alpha"));
  EXPECT_TRUE(limiter.Admit(LogLevel::kInfo, "session opened", "beta"));
  EXPECT_TRUE(limiter.Admit(LogLevel::kInfo, "session closed", "alpha"));
  EXPECT_TRUE(limiter.EndWindow(begin + LogLimiter::kWindow - std::chrono::seconds(1)).empty());
  const auto ended = limiter.EndWindow(begin + LogLimiter::kWindow);
  ASSERT_EQ(ended.size(), 1);
  EXPECT_EQ(ended[0].message, "session opened");
  EXPECT_EQ(ended[0].tenant, "alpha");
  EXPECT_EQ(ended[0].lines, 2);
  EXPECT_TRUE(limiter.Admit(LogLevel::kInfo, "session opened", "alpha"));
}

TEST(LogLimiter, ManyMessagesShareOneBound) {
  LogLimiter limiter;
  uint64_t admitted = 0;
  for (size_t i = 0; i < 2 * LogLimiter::kMaxKeys; ++i) {
    admitted += limiter.Admit(LogLevel::kInfo, std::to_string(i), "") ? 1 : 0;
  }
  EXPECT_EQ(admitted, LogLimiter::kMaxKeys + LogLimiter::kLines);
}

// In a separate process, whose stderr is a pipe that the test reads at any time.
TEST(Log, AnUnreadPipeBlocksNoCaller) {
  int pipe_ends[2], go[2];
  ASSERT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(go, O_CLOEXEC), 0);
  constexpr int kLines = 20'000;
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], STDERR_FILENO);
    ConfigureLog("info", "text");
    if (!LogInBackground().ok()) _exit(1);
    const auto begun = std::chrono::steady_clock::now();
    for (int i = 0; i < kLines; ++i) LogAudit("action", {{"number", i}});
    FlushLog(std::chrono::milliseconds(100));
    if (std::chrono::steady_clock::now() - begun > std::chrono::seconds(5)) _exit(2);
    if (CountLogLines().dropped == 0) _exit(3);
    char byte = 'r';
    if (write(go[1], &byte, 1) != 1) _exit(4);
    // While the reader is still reading earlier lines.
    Log(LogLevel::kInfo, "last");
    FlushLog(std::chrono::seconds(10));
    _exit(0);
  }
  close(pipe_ends[1]);
  char byte;
  ASSERT_EQ(read(go[0], &byte, 1), 1);
  std::string text;
  char bytes[4096];
  for (ssize_t got; (got = read(pipe_ends[0], bytes, sizeof bytes)) > 0;) text.append(bytes, got);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_NE(text.find(" warning log lines dropped because stderr was not read lines="), std::string::npos);
  EXPECT_NE(text.find(" info last\n"), std::string::npos);
  EXPECT_LT(std::ranges::count(text, '\n'), kLines);
}

TEST(Log, ALineIsBounded) {
  ConfigureLog("info", "text");
  testing::internal::CaptureStderr();
  Log(LogLevel::kInfo, "long", {{"text", std::string(100'000, 'x')}});
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_LT(line.size(), 10'000);
  EXPECT_NE(line.find("bytes cut)\n"), std::string::npos);
  ConfigureLog("info", "json");
  testing::internal::CaptureStderr();
  Log(LogLevel::kInfo, "long", {{"text", std::string(100'000, 'x')}});
  const nlohmann::json parsed = nlohmann::json::parse(testing::internal::GetCapturedStderr());
  EXPECT_EQ(parsed["message"], "log line truncated");
  ConfigureLog("info", "text");
}

}  // namespace
}  // namespace ashlar::daemon
