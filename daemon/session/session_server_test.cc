// SPDX-License-Identifier: Apache-2.0
// The session socket, without the client library.
#include "daemon/session/session_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/testing/node.h"
#include "daemon/testing/test_engine.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

v1::SessionRequest RegisterRequest(uint64_t bytes) {
  v1::SessionRequest request;
  request.mutable_register_region()->set_bytes(bytes);
  return request;
}

v1::SessionRequest HostRequest(uint64_t bytes) {
  v1::SessionRequest request;
  request.mutable_host_region()->set_bytes(bytes);
  return request;
}

v1::SessionRequest DropRequest(uint64_t region) {
  v1::SessionRequest request;
  request.mutable_drop_region()->set_region(region);
  return request;
}

class SessionServerTest : public ::testing::Test {
 protected:
  // A session that has sent Hello.
  RawSession Greeted() {
    RawSession session(node_);
    EXPECT_TRUE(StatusOf(session.Hello()).ok());
    return session;
  }

  TestNode node_;
};

TEST_F(SessionServerTest, SocketsHaveMode0660) {
  for (const std::string& path : {node_.session_socket(), node_.rpc_socket()}) {
    struct stat found;
    ASSERT_EQ(stat(path.c_str(), &found), 0);
    EXPECT_EQ(found.st_mode & 0777, 0660u) << path;
  }
}

TEST_F(SessionServerTest, HelloIsWelcomed) {
  RawSession session(node_), other(node_);
  UniqueFd daemon;
  const auto reply = session.Hello(&daemon);
  ASSERT_TRUE(StatusOf(reply).ok());
  EXPECT_EQ(reply->welcome().protocol(), limits::kProtocolMax);
  EXPECT_EQ(reply->welcome().session().size(), kSecretBytes);
  EXPECT_EQ(reply->welcome().tenant(), "default");
  EXPECT_EQ(reply->welcome().extent_bytes(), limits::kExtentBytes);
  EXPECT_EQ(reply->welcome().daemon_epoch().size(), kSecretBytes);
  const auto second = other.Hello();
  EXPECT_NE(reply->welcome().session(), second->welcome().session());
  EXPECT_EQ(reply->welcome().daemon_epoch(), second->welcome().daemon_epoch());
  EXPECT_NE(reply->welcome().daemon_epoch(), RawSession(TestNode()).Hello()->welcome().daemon_epoch());

  // The daemon is this process, and alive.
  siginfo_t unused;
  EXPECT_EQ(waitid(P_PIDFD, static_cast<id_t>(daemon.get()), &unused, WEXITED | WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD) << "a process, not a child of this one";
  pollfd end{daemon.get(), POLLIN, 0};
  EXPECT_EQ(poll(&end, 1, 0), 0);
}

TEST_F(SessionServerTest, AnotherVersionIsRefused) {
  v1::SessionRequest request;
  request.mutable_hello()->set_protocol_min(limits::kProtocolMax + 1);
  request.mutable_hello()->set_protocol_max(limits::kProtocolMax + 5);
  RawSession newer(node_);
  const absl::Status refusal = StatusOf(newer.Ask(request));
  EXPECT_EQ(refusal.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refusal.message(), absl::StrCat("hello.protocol_max: no common version; the daemon speaks ",
                                            limits::kProtocolMin, " to ", limits::kProtocolMax, "; the client speaks ",
                                            limits::kProtocolMax + 1, " to ", limits::kProtocolMax + 5));
  EXPECT_TRUE(newer.Closed());

  // Version 1 named a prefix's objects by their order.
  request.mutable_hello()->set_protocol_min(1);
  request.mutable_hello()->set_protocol_max(1);
  RawSession older(node_);
  const absl::Status old = StatusOf(older.Ask(request));
  EXPECT_EQ(old.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(old.message(), "hello.protocol_max: no common version; the daemon speaks 2 to 5; the client speaks 1 to 1");
  EXPECT_TRUE(older.Closed());

  request.mutable_hello()->set_protocol_min(2);
  request.mutable_hello()->set_protocol_max(1);
  RawSession absurd(node_);
  EXPECT_THAT(StatusOf(absurd.Ask(request)).ToString(), HasSubstr("hello.protocol_min"));

  request.mutable_hello()->set_protocol_min(0);
  request.mutable_hello()->set_protocol_max(1'000'000);
  RawSession wide(node_);
  EXPECT_EQ(wide.Ask(request)->welcome().protocol(), limits::kProtocolMax);
}

TEST_F(SessionServerTest, ProtocolErrorEndsSession) {
  v1::SessionRequest no_request, second_hello;
  second_hello.mutable_hello()->set_protocol_max(limits::kProtocolMax);
  const struct {
    const char* name;
    std::string bytes;
    bool greeted;
    const char* error;
  } kCases[] = {
      {"noise", "\xff\xff\xff\xff not protobuf", false, "message: cannot be parsed as SessionRequest"},
      {"noise after hello", "\xff\xff\xff\xff not protobuf", true, "message: cannot be parsed as SessionRequest"},
      {"first not hello", HostRequest(4096).SerializeAsString(), false, "request: the first request must be hello"},
      {"oversized", std::string(limits::kMaxSessionMessageBytes + 1, 'x'), false,
       "message: too long; expected at most"},
      {"oversized after hello", std::string(limits::kMaxSessionMessageBytes + 1, 'x'), true,
       "message: too long; expected at most"},
      {"hello twice", second_hello.SerializeAsString(), true, "hello: already received"},
      {"unknown request", std::string("\x7a\x00", 2), true, "request: unknown request type"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.name);
    RawSession session(node_);
    if (c.greeted) {
      ASSERT_TRUE(StatusOf(session.Hello()).ok());
    }
    ASSERT_TRUE(session.Send(c.bytes));
    const absl::Status status = StatusOf(session.Receive());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), StartsWith(c.error));
    EXPECT_TRUE(session.Closed());
  }
}

TEST_F(SessionServerTest, EmptyDatagramEndsTheSession) {
  RawSession session = Greeted();
  ASSERT_TRUE(session.Send(""));
  EXPECT_TRUE(session.Closed());
}

TEST_F(SessionServerTest, DescriptorsNeverLeak) {
  const UniqueFd memfd = MakeMemfd(4096, 0);
  const std::vector<int> eight(8, memfd.get()), many(100, memfd.get());
  const size_t before = OpenDescriptors();
  for (int round = 0; round < 3; ++round) {
    // Refused without ending the session: a shrinkable file; too many descriptors; a descriptor where none belongs.
    RawSession session = Greeted();
    EXPECT_THAT(StatusOf(session.Ask(RegisterRequest(4096), std::vector<int>{memfd.get()})).ToString(),
                HasSubstr("F_SEAL_SHRINK"));
    EXPECT_THAT(StatusOf(session.Ask(RegisterRequest(4096), eight)).ToString(), HasSubstr("expected exactly one"));
    EXPECT_THAT(StatusOf(session.Ask(HostRequest(4096), eight)).ToString(),
                HasSubstr("this request takes no descriptor"));
    // Refused, ending the session: more than a message may carry; noise; a message before Hello.
    EXPECT_EQ(StatusOf(session.Ask(RegisterRequest(4096), many)).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(session.Closed());
    RawSession noise = Greeted();
    ASSERT_TRUE(noise.Send("\xff\xff", eight));
    EXPECT_TRUE(noise.Receive().ok());
    RawSession early(node_);
    EXPECT_TRUE(early.Ask(RegisterRequest(4096), eight).ok());
    // Never read: the daemon answers the first and closes.
    RawSession unread(node_);
    ASSERT_TRUE(unread.Send("\xff", eight));
    unread.Send("\xff", eight);
  }
  EXPECT_TRUE(Eventually([&] { return OpenDescriptors() == before; })) << OpenDescriptors() << " from " << before;
}

TEST_F(SessionServerTest, OnlySealedMemfdsOfTheRightSizeAreRegistered) {
  RawSession session = Greeted();
  const UniqueFd sealed = MakeMemfd(8192, F_SEAL_SHRINK), growing = MakeMemfd(8192, F_SEAL_GROW);
  const UniqueFd unwritable = MakeMemfd(8192, F_SEAL_SHRINK | F_SEAL_WRITE);
  const UniqueFd read_only(open(absl::StrCat("/proc/self/fd/", sealed.get()).c_str(), O_RDONLY | O_CLOEXEC));
  const UniqueFd file(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  const UniqueFd folder(open("/tmp", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(file.valid() && read_only.valid());
  ASSERT_EQ(ftruncate(file.get(), 8192), 0);
  const struct {
    int fd;
    uint64_t bytes;
    const char* error;
  } kCases[] = {
      {sealed.get(), 0, "register_region.bytes: 0; expected at least 1"},
      {sealed.get(), 8193, "register_region.bytes: the memfd has only 8192 bytes"},
      {sealed.get(), ~uint64_t{0}, "register_region.bytes: the memfd has only"},
      {growing.get(), 8192, "register_region.descriptor: must be sealed with F_SEAL_SHRINK"},
      {unwritable.get(), 8192, "register_region.descriptor: cannot be mapped for writing"},
      {read_only.get(), 8192, "register_region.descriptor: cannot be mapped for writing"},
      {file.get(), 8192, "register_region.descriptor: "},
      {folder.get(), 8192, "register_region.descriptor: expected a memfd"},
  };
  for (const auto& c : kCases) {
    const absl::Status status = StatusOf(session.Ask(RegisterRequest(c.bytes), std::vector<int>{c.fd}));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.error;
    EXPECT_THAT(std::string(status.message()), StartsWith(c.error));
  }
  EXPECT_THAT(StatusOf(session.Ask(RegisterRequest(8192))).ToString(), HasSubstr("register_region.descriptor"));
  // The session still works afterwards.
  const auto reply = session.Ask(RegisterRequest(8192), std::vector<int>{sealed.get()});
  ASSERT_TRUE(StatusOf(reply).ok()) << StatusOf(reply);
  const auto dropped = session.Ask(DropRequest(reply->region().region()));
  EXPECT_TRUE(StatusOf(dropped).ok());
  EXPECT_EQ(dropped->region().region(), reply->region().region());
  EXPECT_THAT(StatusOf(session.Ask(DropRequest(reply->region().region()))).ToString(),
              HasSubstr("drop_region.region: unknown region"));
}

TEST_F(SessionServerTest, HostedRegionIsSealedAndShared) {
  RawSession session = Greeted();
  UniqueFd memfd;
  const auto reply = session.Ask(HostRequest(1 << 20), {}, &memfd);
  ASSERT_TRUE(StatusOf(reply).ok());
  ASSERT_TRUE(memfd.valid());
  struct stat file;
  ASSERT_EQ(fstat(memfd.get(), &file), 0);
  EXPECT_EQ(file.st_size, 1 << 20);
  EXPECT_NE(ftruncate(memfd.get(), 4096), 0);
  EXPECT_NE(ftruncate(memfd.get(), 1 << 21), 0);
  void* mapped = mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  static_cast<char*>(mapped)[12345] = 7;
  munmap(mapped, 1 << 20);
  EXPECT_THAT(StatusOf(session.Ask(HostRequest(0))).ToString(), HasSubstr("host_region.bytes: 0; expected at least 1"));
  EXPECT_THAT(StatusOf(session.Ask(HostRequest(~uint64_t{0}))).ToString(), HasSubstr("host_region.bytes"));
}

TEST(SessionLimits, RegionsOfOneSessionAreBounded) {
  const TestNode node("sessions: {region_bytes: 1MiB}");
  RawSession session(node);
  ASSERT_TRUE(StatusOf(session.Hello()).ok());
  const auto first = session.Ask(HostRequest(1 << 20));
  ASSERT_TRUE(StatusOf(first).ok());
  const absl::Status hosted = StatusOf(session.Ask(HostRequest(4096)));
  EXPECT_EQ(hosted.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(hosted.message(), "host_region.bytes: a session has at most 1048576 bytes of regions");
  const UniqueFd memfd = MakeMemfd(4096, F_SEAL_SHRINK);
  const absl::Status registered = StatusOf(session.Ask(RegisterRequest(4096), std::vector<int>{memfd.get()}));
  EXPECT_EQ(registered.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(registered.message()), StartsWith("register_region.bytes: a session has at most"));
  ASSERT_TRUE(StatusOf(session.Ask(DropRequest(first->region().region()))).ok());
  EXPECT_TRUE(StatusOf(session.Ask(HostRequest(4096))).ok());
}

TEST(SessionLimits, RegionsOfOneTenantAreBounded) {
  const TestNode node(absl::StrCat("tenants: [{name: a, uids: [", geteuid(),
                                   "], dram_bytes: 4MiB, region_bytes: 1MiB}]\nsessions: {region_bytes: 64MiB}"));
  RawSession first(node), second(node);
  ASSERT_TRUE(StatusOf(first.Hello()).ok());
  ASSERT_TRUE(StatusOf(second.Hello()).ok());
  const absl::Status alone = StatusOf(first.Ask(HostRequest((1 << 20) + 1)));
  EXPECT_EQ(alone.message(), "host_region.bytes: a tenant has at most 1048576 bytes of regions");
  ASSERT_TRUE(StatusOf(first.Ask(HostRequest(1 << 20))).ok());
  EXPECT_EQ(StatusOf(second.Ask(HostRequest(4096))).code(), absl::StatusCode::kResourceExhausted);
  first.Close();
  EXPECT_TRUE(Eventually([&] { return StatusOf(second.Ask(HostRequest(1 << 20))).ok(); }));
}

TEST(SessionLimits, MemoryBeyondTheMachinesIsNotHosted) {
  const TestNode node("sessions: {region_bytes: 1024TiB}");
  RawSession session(node);
  ASSERT_TRUE(StatusOf(session.Hello()).ok());
  const absl::Status refused = StatusOf(session.Ask(HostRequest(uint64_t{1} << 45)));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), StartsWith("host_region.bytes: "));
  UniqueFd memfd;
  ASSERT_TRUE(StatusOf(session.Ask(HostRequest(1 << 20), {}, &memfd)).ok());
  struct stat file;
  ASSERT_EQ(fstat(memfd.get(), &file), 0);
  EXPECT_GE(file.st_blocks * 512, 1 << 20) << "its pages are there";
}

TEST(SessionLimits, SessionsBeyondTheLimitAreRefused) {
  const TestNode node("sessions: {max_sessions: 2}");
  RawSession first(node), second(node), third(node);
  ASSERT_TRUE(StatusOf(first.Hello()).ok());
  ASSERT_TRUE(StatusOf(second.Hello()).ok());
  EXPECT_EQ(StatusOf(third.Hello()).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(third.Closed());
  first.Close();
  EXPECT_TRUE(Eventually([&] { return StatusOf(RawSession(node).Hello()).ok(); }));
}

TEST(SessionLimits, TenantCannotTakeAllSessions) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can be several users";
  const TestNode node(
      "sessions: {max_sessions: 3}\n"
      "tenants: [{name: a, uids: [0], dram_bytes: 4MiB, max_sessions: 2}, {name: b, uids: [65531], dram_bytes: 4MiB}]");
  RawSession first(node), second(node), third(node);
  ASSERT_TRUE(StatusOf(first.Hello()).ok());
  ASSERT_TRUE(StatusOf(second.Hello()).ok());
  const absl::Status status = StatusOf(third.Hello());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "tenant a already has 2 sessions, its limit (max_sessions)");
  AsUser(65531, [&] {
    RawSession other(node), one_more(node);
    EXPECT_TRUE(StatusOf(other.Hello()).ok());
    EXPECT_EQ(StatusOf(one_more.Hello()).message(), "sessions.max_sessions: the daemon already serves 3 sessions");
  });
  first.Close();
  EXPECT_TRUE(Eventually([&] { return StatusOf(RawSession(node).Hello()).ok(); }));
}

TEST(SessionLimits, SilentConnectionsDoNotCountAsSessions) {
  const TestNode node("sessions: {max_sessions: 1}");
  RawSession oldest(node);
  std::vector<RawSession> silent;
  for (int i = 0; i < 64; ++i) silent.emplace_back(node);
  EXPECT_TRUE(oldest.Closed()) << "more than 64 are not kept waiting";
  EXPECT_TRUE(StatusOf(silent.back().Hello()).ok());
  EXPECT_EQ(StatusOf(silent[40].Hello()).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(silent[30].Closed()) << "nor for long";
  EXPECT_THAT(StatusOf(silent.back().Hello()).ToString(), HasSubstr("already received")) << "the session goes on";
}

TEST(SessionTenants, UsersOfNoTenantAreRefused) {
  const TestNode node(absl::StrCat("tenants: [{name: other, uids: [", geteuid() + 1, "], dram_bytes: 4MiB}]"));
  RawSession told(node);
  EXPECT_EQ(StatusOf(told.Receive()).code(), absl::StatusCode::kPermissionDenied) << "before it has said anything";
  EXPECT_TRUE(told.Closed());
  std::vector<RawSession> many;
  for (int i = 0; i < 65; ++i) many.emplace_back(node);
  EXPECT_EQ(StatusOf(many[0].Receive()).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(many[0].Closed());
  RawSession session(node);
  const absl::Status status = StatusOf(session.Hello());
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(geteuid())));
  EXPECT_TRUE(session.Closed());
}

TEST_F(SessionServerTest, ClosingTheSocketFreesTheEnginesHoldings) {
  TestEngine watcher(node_);
  const std::vector<int32_t> tokens(32, 5);
  {
    TestEngine engine(node_);
    ASSERT_EQ(engine.Reserve(ObjectKind::kSegment, tokens).outcome(), static_cast<uint32_t>(ReserveOutcome::kGranted));
    EXPECT_EQ(watcher.Reserve(ObjectKind::kSegment, tokens).outcome(),
              static_cast<uint32_t>(ReserveOutcome::kBeingPublished));
  }
  EXPECT_TRUE(Eventually([&] {
    return watcher.Reserve(ObjectKind::kSegment, tokens).outcome() == static_cast<uint32_t>(ReserveOutcome::kGranted);
  }));
}

// A forked child keeps the socket open; the death of the process that sent Hello still ends the session.
TEST(SessionDeath, IsNoticedWhileChildKeepsSocket) {
  int to_engine[2], to_test[2];
  ASSERT_EQ(pipe(to_engine), 0);
  ASSERT_EQ(pipe(to_test), 0);
  const pid_t engine = fork();  // before this process has threads
  if (engine == 0) {
    char path[200] = {};
    if (read(to_engine[0], path, sizeof path) <= 0) _exit(1);
    RawSession session{std::string(path)};
    if (!session.Hello().ok()) _exit(1);
    if (fork() != 0) _exit(0);
    // The child holds the socket until the daemon closes its end.
    const char byte = session.Closed() ? 'c' : 'o';
    _exit(write(to_test[1], &byte, 1) == 1 ? 0 : 1);
  }
  const TestNode node;
  ASSERT_GT(write(to_engine[1], node.session_socket().c_str(), node.session_socket().size() + 1), 0);
  int status = 0;
  ASSERT_EQ(waitpid(engine, &status, 0), engine);
  ASSERT_EQ(status, 0);
  char byte = 0;
  ASSERT_EQ(read(to_test[0], &byte, 1), 1);
  EXPECT_EQ(byte, 'c');
  for (int fd : {to_engine[0], to_engine[1], to_test[0], to_test[1]}) close(fd);
}

}  // namespace
}  // namespace ashlar::daemon
