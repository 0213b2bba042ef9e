// SPDX-License-Identifier: Apache-2.0
#include "client/session/process_bound.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <string>

#include "client/session/descriptor.h"
#include "client/session/peer_process.h"
#include "client/session/unix_socket.h"
#include "client/testing/fixtures.h"

namespace ashlar::internal {
namespace {

// Runs `body` in a forked child; true when it returned true there.
template <typename Body>
bool InForkedChild(Body body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

struct Counted {
  explicit Counted(int* destroyed) : destroyed_(destroyed) {}
  ~Counted() { ++*destroyed_; }
  int* destroyed_;
};

TEST(ProcessBound, IsDestroyedOnlyInItsOwnProcess) {
  int destroyed = 0;
  std::shared_ptr<Counted> object = MakeProcessBound<Counted>(&destroyed);
  EXPECT_TRUE(InForkedChild([&] {
    object.reset();
    return destroyed == 0;
  }));
  object.reset();
  EXPECT_EQ(destroyed, 1);
}

TEST(CreatorProcess, DistinguishesAChildFromItsParent) {
  const CreatorProcess here;
  EXPECT_FALSE(here.InChild());
  EXPECT_TRUE(InForkedChild([&] { return here.InChild(); }));
}

TEST(ForkClosedSocket, IsNotUsableInAChild) {
  Listener listener;
  auto socket = ForkClosedSocket::Connect(listener.path(), SOCK_SEQPACKET, After(std::chrono::seconds(5)));
  ASSERT_TRUE(socket.ok()) << socket.status();
  const Descriptor peer = listener.Accept();
  int hold[2];
  ASSERT_EQ(::pipe2(hold, O_CLOEXEC), 0);
  Descriptor release(hold[1]);
  const Descriptor held(hold[0]);

  const pid_t child = ::fork();
  if (child == 0) {
    char byte;
    const ssize_t got = ::read(held.get(), &byte, 1);  // lives until the parent closes the socket
    ::_exit(static_cast<int>(got));
  }
  { const ForkClosedSocket closed = *std::move(socket); }
  struct pollfd end = {.fd = peer.get(), .events = POLLRDHUP, .revents = 0};
  EXPECT_EQ(::poll(&end, 1, 5000), 1) << "the child keeps the socket open";
  EXPECT_EQ(::write(release.get(), "x", 1), 1);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST(ConnectUnix, NamesTheError) {
  const Deadline soon = After(std::chrono::milliseconds(50));
  EXPECT_EQ(ConnectUnix("/nonexistent/socket", SOCK_STREAM, soon).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ConnectUnix(std::string(200, 'a'), SOCK_STREAM, soon).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ConnectUnix("", SOCK_STREAM, soon).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PeerProcess, ReportsOnlyDeadProcessesAsDead) {
  EXPECT_FALSE(PeerProcess().Dead());
  const auto self = PeerProcess::Of(Pidfd(::getpid()));
  ASSERT_TRUE(self.ok()) << self.status();
  EXPECT_FALSE(self->Dead());

  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  const auto peer = PeerProcess::Of(Pidfd(child));
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_FALSE(peer->Dead());
  EXPECT_FALSE(peer->WaitDead(After(std::chrono::milliseconds(20))));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  EXPECT_TRUE(peer->WaitDead(After(std::chrono::seconds(5))));
  const auto late = PeerProcess::Of(Pidfd(child));  // a zombie: only its parent can wait for it
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_TRUE(late->Dead());
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(peer->Dead());
}

TEST(PeerProcess, AcceptsOnlyAPidfd) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Descriptor writing(ends[1]);
  EXPECT_EQ(PeerProcess::Of(Descriptor(ends[0])).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PeerProcess::Of(MakeMemfd(4096, 0)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PeerProcess::Of(Descriptor(::open("/proc/self", O_RDONLY | O_CLOEXEC))).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PeerProcess::Of(Descriptor()).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ashlar::internal
