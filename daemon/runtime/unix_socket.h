// SPDX-License-Identifier: Apache-2.0
// Unix sockets by path: claiming the path, listening, and messages with descriptors.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/runtime/unique_fd.h"

namespace ashlar::daemon {

// Claims `path` against other daemons until the claim is destroyed; bind before that. A socket of a dead daemon is
// removed. ALREADY_EXISTS if a live process answers, or if the path is not a socket.
//
// The claim is a lock on the file `path`.lock, mode 0600, which is removed with it. Only the daemon's user can open the
// file, so no other user can hold the lock. FAILED_PRECONDITION if another user owns the file, or if it is not a
// regular file: only users who can write to the directory can cause that, and they could take `path` itself. Another
// daemon of the same user holds the lock briefly while it starts; UNAVAILABLE if it holds the lock for longer than
// kPatience.
class PathClaim {
 public:
  static constexpr std::chrono::milliseconds kPatience{2000};

  // `type` is the expected socket type (SOCK_STREAM, SOCK_SEQPACKET).
  static absl::StatusOr<PathClaim> Take(const std::string& path, int type);
  PathClaim(PathClaim&&) = default;
  PathClaim& operator=(PathClaim&&) = delete;
  ~PathClaim();

 private:
  PathClaim(std::string lock_path, UniqueFd lock) : lock_path_(std::move(lock_path)), lock_(std::move(lock)) {}
  std::string lock_path_;
  UniqueFd lock_;
};

// A bound path that is removed with this object, unless another socket has replaced it.
class BoundPath {
 public:
  // `path` was just bound. Sets its mode.
  static absl::StatusOr<BoundPath> Adopt(const std::string& path, mode_t mode);
  BoundPath() = default;
  BoundPath(BoundPath&& other) noexcept;
  BoundPath& operator=(BoundPath&& other) noexcept;
  ~BoundPath();

 private:
  std::string path_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

struct Listener {
  UniqueFd fd;     // non-blocking
  UniqueFd spare;  // closed to accept and refuse one more connection when descriptors run out
  BoundPath path;
};
// For engines: users in the socket's group. For operators: the daemon's user and root.
inline constexpr mode_t kEngineSocketMode = 0660, kAdminSocketMode = 0600;
// Claims, binds and listens on a socket of `type` (SOCK_STREAM, SOCK_SEQPACKET).
absl::StatusOr<Listener> Listen(const std::string& path, int type, mode_t mode = kEngineSocketMode);
// Accepts a bounded number of waiting connections, and passes each one, non-blocking, to `admit`.
void AcceptSome(Listener& listener, const std::function<void(UniqueFd)>& admit);
// Returns the peer's credentials from the kernel; nothing for a socket without them.
std::optional<ucred> PeerOf(int socket);

// bind creates the socket with a mode from the umask. Within this scope it is never wider than 0660. The umask is that
// of the process, so use this only during startup.
class SocketUmask {
 public:
  SocketUmask();
  ~SocketUmask();
  SocketUmask(const SocketUmask&) = delete;
  SocketUmask& operator=(const SocketUmask&) = delete;

 private:
  mode_t old_;
};

struct Datagram {
  std::string bytes;
  std::vector<UniqueFd> descriptors;
};
// Receives one datagram without blocking. UNAVAILABLE: no datagram. OUT_OF_RANGE: the peer has closed (an empty
// datagram looks the same). INVALID_ARGUMENT: longer than limits::kMaxSessionMessageBytes, or more descriptors than
// limits::kMaxDescriptorsPerMessage; its descriptors are closed.
absl::StatusOr<Datagram> Receive(int socket);

// Sends one datagram, with `descriptor` unless it is −1. Never blocks or raises SIGPIPE. RESOURCE_EXHAUSTED: this user
// has as many descriptors in flight as it may have open files; retry later.
absl::Status Send(int socket, const std::string& bytes, int descriptor = -1);

}  // namespace ashlar::daemon
