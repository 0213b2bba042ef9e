// SPDX-License-Identifier: Apache-2.0
#include "client/session/session_channel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ashlar/v1/session.pb.h"
#include "client/testing/fixtures.h"
#include "proto/limits.h"

namespace ashlar::internal {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr milliseconds kPatience{10'000};

v1::SessionReply GoodWelcome() {
  v1::SessionReply reply;
  reply.set_clock_ns(MonotonicNanos(std::chrono::steady_clock::now()));
  reply.mutable_welcome()->set_protocol(limits::kProtocolMax);
  reply.mutable_welcome()->set_session(std::string(16, 's'));
  reply.mutable_welcome()->set_daemon_epoch(std::string(16, 'r'));
  reply.mutable_welcome()->set_tenant("tenant");
  reply.mutable_welcome()->set_extent_bytes(limits::kExtentBytes);
  return reply;
}

v1::SessionReply RegionGrant(uint64_t id) {
  v1::SessionReply reply;
  reply.mutable_region()->set_region(id);
  return reply;
}

// The daemon's end of one session, run by a script on a separate thread.
class ScriptedDaemon {
 public:
  using Script = std::function<void(ScriptedDaemon&)>;

  explicit ScriptedDaemon(Script script)
      : thread_([this, script = std::move(script)] {
          socket_ = listener_.Accept();
          script(*this);
        }) {}
  ~ScriptedDaemon() { thread_.join(); }

  const std::string& path() const { return listener_.path(); }

  v1::SessionRequest Read() {
    char bytes[4096];
    const ssize_t size = ::recv(socket_.get(), bytes, sizeof bytes, 0);
    v1::SessionRequest request;
    EXPECT_TRUE(size > 0 && request.ParseFromArray(bytes, static_cast<int>(size)));
    return request;
  }

  void Write(const v1::SessionReply& reply, int descriptor = -1) {
    std::string bytes = reply.SerializeAsString();
    struct iovec data = {.iov_base = bytes.data(), .iov_len = bytes.size()};
    alignas(struct cmsghdr) char space[CMSG_SPACE(sizeof descriptor)] = {};
    struct msghdr message {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (descriptor >= 0) {
      message.msg_control = space;
      message.msg_controllen = sizeof space;
      struct cmsghdr* part = CMSG_FIRSTHDR(&message);
      part->cmsg_level = SOL_SOCKET;
      part->cmsg_type = SCM_RIGHTS;
      part->cmsg_len = CMSG_LEN(sizeof descriptor);
      std::memcpy(CMSG_DATA(part), &descriptor, sizeof descriptor);
    }
    EXPECT_GE(::sendmsg(socket_.get(), &message, MSG_NOSIGNAL), 0);
  }

  void WriteBytes(const std::string& bytes) {
    EXPECT_GE(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
  }

  void HangUp() { socket_ = Descriptor(); }

  void Welcome() {
    EXPECT_TRUE(Read().has_hello());
    Write(GoodWelcome(), Pidfd(::getpid()).get());
  }

 private:
  Listener listener_;
  Descriptor socket_;
  std::thread thread_;
};

absl::StatusOr<std::unique_ptr<SessionChannel>> Open(const ScriptedDaemon& daemon) {
  return SessionChannel::Open(daemon.path(), "test", After(kPatience));
}

absl::Status Greeting(const v1::SessionReply& reply, const Descriptor& process = Pidfd(::getpid())) {
  ScriptedDaemon daemon([&](ScriptedDaemon& self) {
    const v1::SessionRequest request = self.Read();
    EXPECT_EQ(request.hello().protocol_min(), limits::kProtocolMin);
    EXPECT_EQ(request.hello().protocol_max(), limits::kProtocolMax);
    self.Write(reply, process.get());
  });
  return Open(daemon).status();
}

TEST(SessionChannel, AgreesOnAVersionOrNamesTheReason) {
  EXPECT_TRUE(Greeting(GoodWelcome()).ok());

  v1::SessionReply refusal;
  refusal.set_code(static_cast<uint32_t>(absl::StatusCode::kFailedPrecondition));
  refusal.set_message("protocol: 2 to 3 only");
  EXPECT_EQ(Greeting(refusal).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(Greeting(refusal).message()), HasSubstr("2 to 3"));

  v1::SessionReply newer = GoodWelcome();
  newer.mutable_welcome()->set_protocol(limits::kProtocolMax + 1);
  EXPECT_EQ(Greeting(newer).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(Greeting(newer).message()),
              HasSubstr("version " + std::to_string(limits::kProtocolMax + 1) + "; this client supports"));

  v1::SessionReply older = GoodWelcome();
  older.mutable_welcome()->set_protocol(1);
  EXPECT_EQ(Greeting(older),
            absl::FailedPreconditionError("the daemon chose protocol version 1; this client supports 2 to 5"));
  v1::SessionReply extents = GoodWelcome();
  extents.mutable_welcome()->set_extent_bytes(2 * limits::kExtentBytes);
  EXPECT_EQ(Greeting(extents).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(Greeting(extents).message()), HasSubstr(std::to_string(2 * limits::kExtentBytes)));
  v1::SessionReply secret = GoodWelcome();
  secret.mutable_welcome()->set_session("short");
  EXPECT_EQ(Greeting(secret).code(), absl::StatusCode::kUnavailable);
}

// Without the pidfd the client could not distinguish a dead daemon from a slow one. A descriptor that is always
// readable would look like a dead one.
TEST(SessionChannel, RefusesAnIncompleteWelcome) {
  const absl::Status none = Greeting(GoodWelcome(), Descriptor());
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(none.message()), HasSubstr("lacks the descriptor of its process"));
  const absl::Status other = Greeting(GoodWelcome(), MakeMemfd(4096, F_SEAL_SHRINK));
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.message()), HasSubstr("not a pidfd"));
  v1::SessionReply nameless = GoodWelcome();
  nameless.mutable_welcome()->clear_daemon_epoch();
  EXPECT_EQ(Greeting(nameless).code(), absl::StatusCode::kFailedPrecondition);
  v1::SessionReply timeless = GoodWelcome();
  timeless.clear_clock_ns();
  EXPECT_EQ(Greeting(timeless).code(), absl::StatusCode::kFailedPrecondition);
}

// The daemon runs in another time namespace: a deadline may arrive early, by the time of its fastest reply, but never
// late.
TEST(SessionChannel, DeadlinesAreInTheDaemonsClock) {
  constexpr int64_t kAhead = 3'600'000'000'000, kSlow = 500'000'000;
  std::atomic<int64_t> slowness = kSlow;
  const auto clock = [&] { return MonotonicNanos(std::chrono::steady_clock::now()) + kAhead - slowness; };
  ScriptedDaemon daemon([&](ScriptedDaemon& self) {
    self.Read();
    v1::SessionReply welcome = GoodWelcome();
    welcome.set_clock_ns(clock());
    self.Write(welcome, Pidfd(::getpid()).get());
    for (int i = 0; i < 2; ++i) {
      self.Read();
      v1::SessionReply grant = RegionGrant(1);
      grant.set_clock_ns(clock());
      self.Write(grant);
    }
  });
  const auto channel = Open(daemon);
  ASSERT_TRUE(channel.ok()) << channel.status();
  const Deadline deadline = After(kPatience);
  const int64_t exact = MonotonicNanos(deadline) + kAhead;
  EXPECT_LE((*channel)->InDaemonsClock(deadline), exact - kSlow);
  EXPECT_GT((*channel)->InDaemonsClock(deadline), exact - kAhead / 2);
  const Descriptor memfd = MakeMemfd(4096, F_SEAL_SHRINK);
  slowness = 0;
  ASSERT_TRUE((*channel)->RegisterRegion(memfd.get(), 4096, kernels::MemoryKind::kHost, {}, After(kPatience)).ok());
  const int64_t after_a_fast_reply = (*channel)->InDaemonsClock(deadline);
  EXPECT_LE(after_a_fast_reply, exact);
  EXPECT_GT(after_a_fast_reply, exact - kSlow);
  slowness = 10 * kSlow;
  ASSERT_TRUE((*channel)->RegisterRegion(memfd.get(), 4096, kernels::MemoryKind::kHost, {}, After(kPatience)).ok());
  EXPECT_EQ((*channel)->InDaemonsClock(deadline), after_a_fast_reply);
}

TEST(SessionChannel, CarriesDescriptors) {
  const Descriptor memory = MakeMemfd(4096, F_SEAL_SHRINK);
  ScriptedDaemon daemon([&](ScriptedDaemon& self) {
    self.Welcome();
    EXPECT_EQ(self.Read().get_arena().arena(), 7u);
    v1::SessionReply reply;
    reply.mutable_arena()->set_arena(7);
    reply.mutable_arena()->set_bytes(4096);
    self.Write(reply, memory.get());
  });
  auto channel = Open(daemon);
  ASSERT_TRUE(channel.ok()) << channel.status();
  auto arena = (*channel)->GetArena(7, After(kPatience));
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ(arena->bytes, 4096u);
  EXPECT_NE(::fcntl(arena->memory.get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_TRUE(Mapping::Map(arena->memory.get(), 4096, Mapping::Access::kRead).ok());
}

// Answers have no numbers: a late answer must not be taken for the next request's, and what it grants is returned.
TEST(SessionChannel, ReturnsTheGrantsOfLateAnswers) {
  ScriptedDaemon daemon([](ScriptedDaemon& self) {
    self.Welcome();
    EXPECT_TRUE(self.Read().has_host_region());
    EXPECT_TRUE(self.Read().has_host_region());  // the first request has timed out
    self.Write(RegionGrant(1), MakeMemfd(4096, F_SEAL_SHRINK).get());
    self.Write(RegionGrant(2), MakeMemfd(4096, F_SEAL_SHRINK).get());
    EXPECT_EQ(self.Read().drop_region().region(), 1u);
    self.Write(RegionGrant(1));  // the answer to the drop
    EXPECT_TRUE(self.Read().has_host_region());
    self.Write(RegionGrant(3), MakeMemfd(4096, F_SEAL_SHRINK).get());
  });
  auto channel = Open(daemon);
  ASSERT_TRUE(channel.ok()) << channel.status();
  auto late = (*channel)->HostRegion(4096, After(milliseconds(1)));
  EXPECT_EQ(late.status().code(), absl::StatusCode::kDeadlineExceeded);
  auto second = (*channel)->HostRegion(4096, After(kPatience));
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->id, 2u);
  auto third = (*channel)->HostRegion(4096, After(kPatience));
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(third->id, 3u);
}

TEST(SessionChannel, PassesOnTheDaemonsErrors) {
  ScriptedDaemon daemon([](ScriptedDaemon& self) {
    self.Welcome();
    self.Read();
    v1::SessionReply reply;
    reply.set_code(static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
    reply.set_message("bytes: too many");
    self.Write(reply);
  });
  auto channel = Open(daemon);
  ASSERT_TRUE(channel.ok()) << channel.status();
  const Descriptor memory = MakeMemfd(4096, F_SEAL_SHRINK);
  const absl::Status status =
      (*channel)->RegisterRegion(memory.get(), 4096, kernels::MemoryKind::kHost, {}, After(kPatience)).status();
  EXPECT_EQ(status, absl::InvalidArgumentError("bytes: too many"));
}

TEST(SessionChannel, CallsEndWhenTheDaemonEnds) {
  ScriptedDaemon daemon([](ScriptedDaemon& self) {
    self.Welcome();
    self.Read();
    self.HangUp();
  });
  auto channel = Open(daemon);
  ASSERT_TRUE(channel.ok()) << channel.status();
  EXPECT_EQ((*channel)->GetArena(1, After(kPatience)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ((*channel)->GetArena(1, After(kPatience)).status().code(), absl::StatusCode::kUnavailable);
}

TEST(SessionChannel, ShutdownEndsACallInFlight) {
  std::promise<void> asked;
  ScriptedDaemon daemon([&](ScriptedDaemon& self) {
    self.Welcome();
    self.Read();
    asked.set_value();  // and never answers
  });
  auto channel = Open(daemon);
  ASSERT_TRUE(channel.ok()) << channel.status();
  std::thread ends([&] {
    asked.get_future().wait();
    (*channel)->Shutdown();
  });
  EXPECT_EQ((*channel)->GetArena(1, After(kPatience)).status().code(), absl::StatusCode::kUnavailable);
  ends.join();
}

TEST(SessionChannel, OpeningCanBeStopped) {
  std::stop_source stop;
  std::promise<void> done;
  ScriptedDaemon daemon([&](ScriptedDaemon& self) {
    self.Read();
    stop.request_stop();
    done.get_future().wait();  // and never answers
  });
  EXPECT_EQ(SessionChannel::Open(daemon.path(), "test", After(std::chrono::hours(1)), stop.get_token()).status().code(),
            absl::StatusCode::kUnavailable);
  done.set_value();
}

// While it lives, this process cannot open anything: every number below the limit is taken. The numbers are the ones of
// the standard streams, which no other thread of the test opens or closes.
class NoDescriptors {
 public:
  NoDescriptors() {
    for (;;) {
      Descriptor next(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (next.get() < 0 || next.get() >= kNumbers) break;
      fillers_.push_back(std::move(next));
    }
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const struct rlimit limit = {.rlim_cur = kNumbers, .rlim_max = before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  static constexpr int kNumbers = 3;
  std::vector<Descriptor> fillers_;
  struct rlimit before_ {};
};

TEST(SessionChannel, SurvivesACallWithoutSpaceForItsDescriptor) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's check of types takes descriptors of its own";
#endif
  const Descriptor memory = MakeMemfd(4096, F_SEAL_SHRINK);
  ScriptedDaemon daemon([&](ScriptedDaemon& self) {
    self.Welcome();
    v1::SessionReply arena;
    arena.mutable_arena()->set_arena(7);
    arena.mutable_arena()->set_bytes(4096);
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(self.Read().get_arena().arena(), 7u);
      self.Write(arena, memory.get());
      if (i > 0) break;
      EXPECT_TRUE(self.Read().has_host_region());
      self.Write(RegionGrant(5), memory.get());
      EXPECT_EQ(self.Read().drop_region().region(), 5u) << "no caller holds the region";
      self.Write(RegionGrant(5));
    }
  });
  auto channel = Open(daemon);
  ASSERT_TRUE(channel.ok()) << channel.status();
  {
    const NoDescriptors none;
    EXPECT_EQ((*channel)->GetArena(7, After(kPatience)).status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ((*channel)->HostRegion(4096, After(kPatience)).status().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_TRUE((*channel)->Alive());
  EXPECT_TRUE((*channel)->GetArena(7, After(kPatience)).ok());
}

TEST(SessionChannel, InvalidMessagesEndTheSession) {
  ScriptedDaemon daemon([](ScriptedDaemon& self) {
    self.Welcome();
    self.Read();
    self.WriteBytes("\xff\xff\xff");
  });
  auto channel = Open(daemon);
  ASSERT_TRUE(channel.ok()) << channel.status();
  EXPECT_EQ((*channel)->GetArena(1, After(kPatience)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ((*channel)->GetArena(1, After(kPatience)).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ashlar::internal
