// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/unix_socket.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "daemon/runtime/log.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

constexpr mode_t kLockMode = 0600;
constexpr int kAcceptedPerTurn = 16;  // messages of others are read in between

UniqueFd OpenSpare() {
  return UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC));
}

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof(address.sun_path) - 1));
  return address;
}

// Returns 0 if a process accepts connections there, otherwise connect's errno.
int Probe(const std::string& path, int type) {
  UniqueFd socket(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return errno;
  const sockaddr_un address = AddressOf(path);
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return 0;
  return errno;
}

// Requires a file that only this user can open. Anyone with write access to the folder may have created it, or a link
// to one of their own files.
absl::Status CheckLockFile(const std::string& path, int file, const struct stat& opened) {
  if (!S_ISREG(opened.st_mode) || opened.st_nlink > 1) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is not a lock file; remove it"));
  }
  if (opened.st_uid != geteuid()) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": user ", opened.st_uid,
                     " created this file; remove it, and let only the daemon's user write to its directory"));
  }
  if ((opened.st_mode & 0777) != kLockMode && fchmod(file, kLockMode) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot set the mode of ", path));
  }
  return absl::OkStatus();
}

// Opens and locks the file. The last holder of the lock may have removed the file before this process got the lock;
// then it opens the new file.
absl::StatusOr<UniqueFd> Lock(const std::string& path) {
  constexpr std::chrono::milliseconds kInterval{10};
  const auto deadline = std::chrono::steady_clock::now() + PathClaim::kPatience;
  for (;;) {
    // O_NONBLOCK: a pipe with that name is refused, not waited for.
    UniqueFd file(open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, kLockMode));
    struct stat opened {};
    if (!file.valid() || fstat(file.get(), &opened) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
    }
    if (opened.st_nlink == 0) continue;
    if (absl::Status status = CheckLockFile(path, file.get(), opened); !status.ok()) return status;
    if (flock(file.get(), LOCK_EX | LOCK_NB) == 0) {
      struct stat named {};
      const bool still =
          lstat(path.c_str(), &named) == 0 && named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
      if (still) return file;
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return absl::ErrnoToStatus(errno, absl::StrCat("cannot lock ", path));
    if (std::chrono::steady_clock::now() >= deadline) {
      return absl::UnavailableError(absl::StrCat(path, ": another process has held the lock for more than ",
                                                 PathClaim::kPatience.count(), " ms"));
    }
    std::this_thread::sleep_for(kInterval);
  }
}

}  // namespace

absl::StatusOr<PathClaim> PathClaim::Take(const std::string& path, int type) {
  const std::string lock_path = absl::StrCat(path, ".lock");
  absl::StatusOr<UniqueFd> lock = Lock(lock_path);
  if (!lock.ok()) return lock.status();
  PathClaim claim(lock_path, *std::move(lock));

  struct stat found;
  if (lstat(path.c_str(), &found) != 0) {
    if (errno == ENOENT) return claim;
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot stat ", path));
  }
  if (!S_ISSOCK(found.st_mode)) return absl::AlreadyExistsError(absl::StrCat(path, ": exists and is not a socket"));
  const int answer = Probe(path, type);
  // EAGAIN: alive with a full backlog. EPROTOTYPE: alive with another type.
  if (answer != ECONNREFUSED) {
    return absl::AlreadyExistsError(absl::StrCat(path, ": another process is listening here (",
                                                 answer == 0 ? "it answers" : std::strerror(answer), ")"));
  }
  if (unlink(path.c_str()) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot remove stale ", path));
  return claim;
}

// Removed before it is unlocked, so that no process locks a file without a name and believes to hold the claim.
PathClaim::~PathClaim() {
  if (lock_.valid()) unlink(lock_path_.c_str());
}

absl::StatusOr<BoundPath> BoundPath::Adopt(const std::string& path, mode_t mode) {
  struct stat bound;
  if (lstat(path.c_str(), &bound) != 0 || chmod(path.c_str(), mode) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot set the mode of ", path));
  }
  BoundPath adopted;
  adopted.path_ = path;
  adopted.device_ = bound.st_dev;
  adopted.inode_ = bound.st_ino;
  return adopted;
}

BoundPath::BoundPath(BoundPath&& other) noexcept {
  *this = std::move(other);
}

BoundPath& BoundPath::operator=(BoundPath&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(device_, other.device_);
  std::swap(inode_, other.inode_);
  return *this;
}

BoundPath::~BoundPath() {
  struct stat now;
  if (path_.empty() || lstat(path_.c_str(), &now) != 0) return;
  if (now.st_dev == device_ && now.st_ino == inode_) unlink(path_.c_str());
}

absl::StatusOr<Listener> Listen(const std::string& path, int type, mode_t mode) {
  absl::StatusOr<PathClaim> claim = PathClaim::Take(path, type);
  if (!claim.ok()) return claim.status();
  Listener listener;
  listener.fd = UniqueFd(socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const sockaddr_un address = AddressOf(path);
  {
    SocketUmask umask;
    if (!listener.fd.valid() ||
        bind(listener.fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot bind ", path));
    }
  }
  absl::StatusOr<BoundPath> bound = BoundPath::Adopt(path, mode);
  if (!bound.ok()) return bound.status();
  listener.path = *std::move(bound);
  if (listen(listener.fd.get(), SOMAXCONN) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot listen on ", path));
  listener.spare = OpenSpare();
  return listener;
}

void AcceptSome(Listener& listener, const std::function<void(UniqueFd)>& admit) {
  const auto accept = [&listener] {
    return UniqueFd(accept4(listener.fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  };
  if (!listener.spare.valid()) listener.spare = OpenSpare();  // lost if another thread took the last descriptor
  for (int accepted = 0; accepted < kAcceptedPerTurn; ++accepted) {
    UniqueFd socket = accept();
    if (socket.valid()) {
      admit(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if ((errno != EMFILE && errno != ENFILE) || !listener.spare.valid()) return;
    Log(LogLevel::kWarning, "no file descriptors left; a connection was refused");
    listener.spare.Reset();
    accept().Reset();
    listener.spare = OpenSpare();
  }
}

std::optional<ucred> PeerOf(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer;
}

SocketUmask::SocketUmask() : old_(umask(~kEngineSocketMode & 0777)) {}
SocketUmask::~SocketUmask() {
  umask(old_);
}

absl::StatusOr<Datagram> Receive(int socket) {
  Datagram datagram;
  datagram.bytes.resize(limits::kMaxSessionMessageBytes);
  alignas(cmsghdr) char control[CMSG_SPACE(limits::kMaxDescriptorsPerMessage * sizeof(int))];
  iovec vector{datagram.bytes.data(), datagram.bytes.size()};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t size;
  do {
    size = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (size < 0 && errno == EINTR);
  if (size < 0) {
    if (errno == EAGAIN) return absl::UnavailableError("nothing to receive");
    return absl::OutOfRangeError("the peer closed the socket");
  }
  // Descriptors are owned before anything is checked, so that none leaks.
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
      datagram.descriptors.emplace_back(fd);
    }
  }
  if ((header.msg_flags & MSG_TRUNC) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("message: too long; expected at most ", limits::kMaxSessionMessageBytes, " bytes"));
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0) {
    return absl::InvalidArgumentError("message: the kernel dropped descriptors; expected at most the allowed number");
  }
  // The kernel pads ancillary data, so one or two descriptors more than allowed may fit.
  if (datagram.descriptors.size() > limits::kMaxDescriptorsPerMessage) {
    return absl::InvalidArgumentError(
        absl::StrCat("message: too many descriptors; expected at most ", limits::kMaxDescriptorsPerMessage));
  }
  if (size == 0) return absl::OutOfRangeError("the peer closed the socket");
  datagram.bytes.resize(static_cast<size_t>(size));
  return datagram;
}

absl::Status Send(int socket, const std::string& bytes, int descriptor) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  iovec vector{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &vector;
  header.msg_iovlen = 1;
  if (descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &descriptor, sizeof descriptor);
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return absl::OkStatus();
  if (errno == ETOOMANYREFS) {
    return absl::ResourceExhaustedError("the daemon's user has too many descriptors in flight; try again");
  }
  return absl::Status(absl::StatusCode::kUnavailable, absl::StrCat("cannot send: ", std::strerror(errno)));
}

}  // namespace ashlar::daemon
