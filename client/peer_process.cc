#include "client/peer_process.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

namespace ashlar::internal {

PeerProcess PeerProcess::Of(int socket) {
  PeerProcess peer;
  struct ucred credentials {};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return peer;
  peer.pid_ = credentials.pid;  // 0: a process of another pid namespace
  if (peer.pid_ > 0) peer.pidfd_ = Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid_, 0)));
  return peer;
}

bool PeerProcess::Dead() const {
  return WaitDead(Deadline());
}

bool PeerProcess::WaitDead(Deadline deadline) const {
  if (pidfd_) {
    struct pollfd end = {.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
    int ready;
    do {
      ready = ::poll(&end, 1, PollTimeout(deadline));
    } while ((ready < 0 && errno == EINTR) || (ready == 0 && !Passed(deadline)));
    return ready > 0;
  }
  // Without a pidfd a number that has vanished is proof enough; one that is in use may be a stranger's by now.
  constexpr std::chrono::milliseconds kInterval{5};
  for (;;) {
    if (pid_ > 0 && ::kill(pid_, 0) != 0 && errno == ESRCH) return true;
    if (Passed(deadline)) return false;
    std::this_thread::sleep_until(std::min(deadline, After(kInterval)));
  }
}

}  // namespace ashlar::internal
