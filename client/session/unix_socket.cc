// SPDX-License-Identifier: Apache-2.0
#include "client/session/unix_socket.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/mutex.h"

namespace ashlar::internal {
namespace {

// The sockets that a forked child closes. The lock is held across fork, so that no socket is half registered in the
// child.
struct ForkRegistry {
  Mutex mutex;
  std::vector<int> sockets ABSL_GUARDED_BY(mutex);
};

ForkRegistry& Registry();

// The thread safety analysis cannot follow a lock that one function takes and another releases.
void BeforeFork() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  Registry().mutex.Lock();
}
void AfterForkInParent() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  Registry().mutex.Unlock();
}
void AfterForkInChild() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (int fd : Registry().sockets) ::close(fd);
  Registry().sockets.clear();
  Registry().mutex.Unlock();
}

ForkRegistry& Registry() {
  static ForkRegistry* const registry = [] {
    ::pthread_atfork(BeforeFork, AfterForkInParent, AfterForkInChild);
    return new ForkRegistry;
  }();
  return *registry;
}

absl::Status Connect(int fd, const std::string& path, Deadline deadline, const std::stop_token& stop) {
  struct sockaddr_un address {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(absl::StrCat("socket path: '", path, "' is empty or too long for a Unix socket"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  constexpr std::chrono::milliseconds kBacklogFull{5};
  while (::connect(fd, reinterpret_cast<const struct sockaddr*>(&address), sizeof address) != 0) {
    if (errno == EINTR) continue;
    if (errno == EPROTOTYPE) {
      return absl::UnavailableError(absl::StrCat(
          path, " is not a session socket; check that it is listen.session_socket, not listen.rpc_socket"));
    }
    if (errno != EAGAIN) return absl::UnavailableError(absl::StrCat("no daemon at ", path, ": ", std::strerror(errno)));
    if (stop.stop_requested()) return absl::CancelledError("connecting was cancelled");
    if (Passed(deadline))
      return absl::UnavailableError(
          absl::StrCat("the daemon at ", path,
                       " did not accept the connection before the deadline; its queue of connections is full"));
    std::this_thread::sleep_for(kBacklogFull);
  }
  return absl::OkStatus();
}

absl::StatusOr<Descriptor> MakeSocket(int type) {
  Descriptor fd(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return absl::ErrnoToStatus(errno, "socket");
  return fd;
}

}  // namespace

absl::StatusOr<Descriptor> ConnectUnix(const std::string& path, int type, Deadline deadline,
                                       const std::stop_token& stop) {
  absl::StatusOr<Descriptor> fd = MakeSocket(type);
  if (!fd.ok()) return fd;
  if (absl::Status status = Connect(fd->get(), path, deadline, stop); !status.ok()) return status;
  return fd;
}

absl::StatusOr<ForkClosedSocket> ForkClosedSocket::Connect(const std::string& path, int type, Deadline deadline,
                                                           const std::stop_token& stop) {
  ForkClosedSocket socket;
  {
    MutexLock lock(Registry().mutex);
    absl::StatusOr<Descriptor> fd = MakeSocket(type);
    if (!fd.ok()) return fd.status();
    Registry().sockets.push_back(fd->get());
    socket.fd_ = fd->release();
  }
  if (absl::Status status = internal::Connect(socket.fd_, path, deadline, stop); !status.ok()) return status;
  return socket;
}

ForkClosedSocket::~ForkClosedSocket() {
  if (fd_ < 0) return;
  MutexLock lock(Registry().mutex);
  std::erase(Registry().sockets, fd_);
  ::close(fd_);
}

}  // namespace ashlar::internal
