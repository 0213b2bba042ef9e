// SPDX-License-Identifier: Apache-2.0
// The audit log records what operators do, and no text of engines.
#include "daemon/admin/audit_log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>

#include "ashlar/v1/admin.pb.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

bool HasBytes(int fd) {
  pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&ready, 1, 500) == 1 && (ready.revents & POLLIN) != 0;
}

class AuditLogTest : public ::testing::Test {
 protected:
  AuditLogTest() {
    std::string name = "/tmp/ashlar_audit_XXXXXX";
    if (mkdtemp(name.data()) == nullptr) std::abort();
    folder_ = name;
  }
  ~AuditLogTest() override { std::filesystem::remove_all(folder_); }
  static std::string Text(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  std::string folder_;
};

TEST_F(AuditLogTest, WritesOneLinePerActionToAPrivateFile) {
  const std::string path = folder_ + "/audit.jsonl";
  auto log = AuditLog::Open(path);
  ASSERT_TRUE(log.ok()) << log.status();
  (*log)->Write({.by = {.uid = 0, .pid = 42, .login_uid = 1000},
                 .action = "Erase",
                 .request = "tenant=a\"b",
                 .outcome = "ok objects=3",
                 .seconds = 0.5});
  (*log)->Write({.by = OperatorOf(0, getpid()), .action = "Drain", .request = "", .outcome = "ok"});
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  std::istringstream lines(Text(path));
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json["action"], "Erase");
  EXPECT_EQ(json["user"], "root");
  EXPECT_EQ(json["uid"], 0);
  EXPECT_EQ(json["pid"], 42);
  EXPECT_EQ(json["login_uid"], 1000);
  EXPECT_EQ(json["request"], "tenant=a\"b");
  EXPECT_EQ(json["outcome"], "ok objects=3");
  EXPECT_THAT(json["time"].get<std::string>(), ::testing::MatchesRegex("[0-9]+-[0-9]+-[0-9]+T.*Z"));
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(nlohmann::json::parse(line)["action"], "Drain");
}

TEST_F(AuditLogTest, AppendsAndSwitchesToAnotherFile) {
  const std::string path = folder_ + "/audit.jsonl", moved = folder_ + "/audit.1";
  { (*AuditLog::Open(path))->Write({.action = "Pin"}); }
  auto log = AuditLog::Open(path);
  (*log)->Write({.action = "Unpin"});
  std::filesystem::rename(path, moved);
  (*log)->Use(*AuditLog::OpenFile(path));
  (*log)->Write({.action = "Evict"});
  EXPECT_THAT(Text(moved), HasSubstr("\"Pin\""));
  EXPECT_THAT(Text(moved), HasSubstr("\"Unpin\""));
  EXPECT_THAT(Text(moved), Not(HasSubstr("Evict")));
  EXPECT_THAT(Text(path), HasSubstr("Evict"));
}

TEST_F(AuditLogTest, TheCallThatChangesTheFileIsLoggedInBoth) {
  const std::string before = folder_ + "/before", after = folder_ + "/after";
  auto log = AuditLog::Open(before);
  (*log)->MoveTo(*AuditLog::OpenFile(after));
  std::thread([&] { (*log)->Write({.action = "Pin"}); }).join();  // another operator's entry meanwhile
  (*log)->Write({.action = "Reload"});
  (*log)->Write({.action = "Evict"});
  EXPECT_THAT(Text(before), HasSubstr("Reload"));
  EXPECT_THAT(Text(before), Not(HasSubstr("Pin")));
  EXPECT_THAT(Text(before), Not(HasSubstr("Evict")));
  for (const char* action : {"Pin", "Reload", "Evict"}) EXPECT_THAT(Text(after), HasSubstr(action));
  (*log)->MoveTo(*AuditLog::OpenFile(""));
  (*log)->Write({.action = "Drain"});
  EXPECT_THAT(Text(after), HasSubstr("Drain")) << "no file from then on";
}

// A full pipe emulates a file on a disk that hangs.
TEST_F(AuditLogTest, AHungFileDelaysNoCaller) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  ASSERT_GT(fcntl(ends[1], F_SETPIPE_SZ, 4096), 0);
  const std::string full(4096, ' ');
  ASSERT_EQ(write(ends[1], full.data(), full.size()), static_cast<ssize_t>(full.size()));
  const auto seconds = [](const auto& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  auto log = *AuditLog::Open("");
  log->Use(AuditLog::File(ends[1]));
  EXPECT_LE(seconds([&] { log->Write({.action = "Pin"}); }), 5);
  const double more = seconds([&] {
    for (int i = 0; i < 1100; ++i) log->Write({.action = "Evict"});
  });
  EXPECT_LE(more, 100) << "it is not waited for again, which would take 550 s";
  const std::string path = folder_ + "/audit";
  EXPECT_LE(seconds([&] { log->MoveTo(*AuditLog::OpenFile(path)); }), 5);
  EXPECT_LE(seconds([&] { log = nullptr; }), 5);
  char bytes[4096];
  while (HasBytes(ends[0])) ASSERT_GT(read(ends[0], bytes, sizeof bytes), 0);
  close(ends[0]);
}

TEST_F(AuditLogTest, RefusesLinksFoldersAndDevices) {
  EXPECT_TRUE(AuditLog::OpenFile("")->get() < 0) << "none was asked for";
  const std::string path = folder_ + "/link";
  ASSERT_EQ(symlink("/tmp/elsewhere", path.c_str()), 0);
  for (const std::string& wrong : {path, folder_, folder_ + "/none/audit", std::string("/dev/null")}) {
    const auto file = AuditLog::OpenFile(wrong);
    ASSERT_TRUE(absl::IsInvalidArgument(file.status())) << wrong;
    EXPECT_THAT(std::string(file.status().message()), HasSubstr("log.audit_file"));
  }
}

TEST_F(AuditLogTest, RestrictsTheModeOfAnExistingFile) {
  const std::string path = folder_ + "/audit";
  { std::ofstream(path) << ""; }
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  ASSERT_TRUE(AuditLog::OpenFile(path).ok());
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST(Describe, LogsTheRequestWithoutTokens) {
  v1::PinRequest request;
  request.set_seconds(60);
  request.mutable_texts()->set_tenant("default");
  request.mutable_texts()->set_ns(std::string("\xab\xcd", 2));
  v1::ObjectName* text = request.mutable_texts()->add_texts();
  text->set_tokens("SECRETSECRET");
  const std::string line = Describe(request);
  EXPECT_THAT(line, HasSubstr("texts.tenant=default"));
  EXPECT_THAT(line, HasSubstr("texts.ns=abcd"));
  EXPECT_THAT(line, HasSubstr("texts.texts=1"));
  EXPECT_THAT(line, HasSubstr("seconds=60"));
  EXPECT_THAT(line, Not(HasSubstr("SECRET")));
  v1::ObjectsReply reply;
  for (const bool found : {true, false, true}) reply.add_found(found);
  EXPECT_EQ(Describe(reply), "found=2");
}

}  // namespace
}  // namespace ashlar::daemon
