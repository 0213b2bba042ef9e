#include "client/process_bound.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cstring>
#include <string>

#include "client/descriptor.h"
#include "client/peer_process.h"
#include "client/test_fixtures.h"
#include "client/unix_socket.h"

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

TEST(ProcessBound, IsDestroyedOnlyWhereItWasMade) {
  int destroyed = 0;
  std::shared_ptr<Counted> object = MakeProcessBound<Counted>(&destroyed);
  EXPECT_TRUE(InForkedChild([&] {
    object.reset();
    return destroyed == 0;
  }));
  object.reset();
  EXPECT_EQ(destroyed, 1);
}

TEST(Birthplace, TellsAChildFromItsParent) {
  const Birthplace here;
  EXPECT_FALSE(here.InChild());
  EXPECT_TRUE(InForkedChild([&] { return here.InChild(); }));
}

TEST(ForkClosedSocket, DoesNotLiveOnInAChild) {
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
    const ssize_t got = ::read(held.get(), &byte, 1);  // lives on until the parent says so
    ::_exit(static_cast<int>(got));
  }
  { const ForkClosedSocket closed = *std::move(socket); }
  struct pollfd end = {.fd = peer.get(), .events = POLLRDHUP, .revents = 0};
  EXPECT_EQ(::poll(&end, 1, 5000), 1) << "the child keeps the socket open";
  EXPECT_EQ(::write(release.get(), "x", 1), 1);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST(ConnectUnix, SaysWhatIsWrong) {
  const Deadline soon = After(std::chrono::milliseconds(50));
  EXPECT_EQ(ConnectUnix("/nonexistent/socket", SOCK_STREAM, soon).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ConnectUnix(std::string(200, 'a'), SOCK_STREAM, soon).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ConnectUnix("", SOCK_STREAM, soon).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PeerProcess, SaysDeadOnlyWhenItIs) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  const Descriptor ours(ends[0]), theirs(ends[1]);
  EXPECT_FALSE(PeerProcess::Of(ours.get()).Dead());  // this very process

  Listener listener;  // listen() sets who the peer is: let a child call it
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const Descriptor is_ready(ready[0]), say_ready(ready[1]);
  const std::string path = listener.path() + "2";
  const pid_t child = ::fork();
  if (child == 0) {
    const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    struct sockaddr_un address {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    const bool listening = ::bind(fd, reinterpret_cast<struct sockaddr*>(&address), sizeof address) == 0 &&
                           ::listen(fd, 1) == 0 && ::write(say_ready.get(), "x", 1) == 1;
    if (listening) ::pause();
    ::_exit(1);
  }
  char byte;
  ASSERT_EQ(::read(is_ready.get(), &byte, 1), 1);
  auto socket = ConnectUnix(path, SOCK_SEQPACKET, After(std::chrono::seconds(5)));
  ASSERT_TRUE(socket.ok()) << socket.status();
  const PeerProcess peer = PeerProcess::Of(socket->get());
  EXPECT_EQ(peer.pid(), child);
  EXPECT_FALSE(peer.Dead());
  EXPECT_FALSE(peer.WaitDead(After(std::chrono::milliseconds(20))));
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  EXPECT_TRUE(peer.WaitDead(After(std::chrono::seconds(5))));
  EXPECT_TRUE(peer.Dead());
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace ashlar::internal
