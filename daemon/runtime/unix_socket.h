// SPDX-License-Identifier: Apache-2.0
// Unix sockets by path: claiming the path, listening, and messages that carry descriptors.
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

// Makes `path` free to bind, and keeps it so against other daemons until the claim is destroyed: bind before that. A
// socket that nobody answers (its daemon was killed) is removed; ALREADY_EXISTS if a live process answers or the path
// is something else than a socket.
//
// The claim is a lock on the file `path`.lock, mode 0600, which is removed with it. Only the daemon's user can open the
// file, so nobody else can hold the lock. FAILED_PRECONDITION if another user has made the file, or it is no regular
// file: only users who may write to the folder can do that, and they could take `path` itself as well. Another daemon
// of the same user holds the lock for an instant while it starts; UNAVAILABLE if it holds it for longer than kPatience.
class PathClaim {
 public:
  static constexpr std::chrono::milliseconds kPatience{2000};

  // `type` is the kind of socket that is expected there (SOCK_STREAM, SOCK_SEQPACKET).
  static absl::StatusOr<PathClaim> Take(const std::string& path, int type);
  PathClaim(PathClaim&&) = default;
  PathClaim& operator=(PathClaim&&) = delete;
  ~PathClaim();

 private:
  PathClaim(std::string lock_path, UniqueFd lock) : lock_path_(std::move(lock_path)), lock_(std::move(lock)) {}
  std::string lock_path_;
  UniqueFd lock_;
};

// A bound path that is removed with this object unless another socket has taken its place.
class BoundPath {
 public:
  // `path` has just been bound. Sets its mode.
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
  UniqueFd spare;  // given up to accept, and turn away, one more peer when descriptors run out
  BoundPath path;
};
// For engines: users of the socket's group. For operators: the daemon's own user, and root.
inline constexpr mode_t kEngineSocketMode = 0660, kAdminSocketMode = 0600;
// Claims, binds and listens on a socket of `type` (SOCK_STREAM, SOCK_SEQPACKET).
absl::StatusOr<Listener> Listen(const std::string& path, int type, mode_t mode = kEngineSocketMode);
// Accepts some of those who wait, never many at a time, and gives each away, non-blocking.
void AcceptSome(Listener& listener, const std::function<void(UniqueFd)>& admit);
// The other end as the kernel says; none for a socket that has none.
std::optional<ucred> PeerOf(int socket);

// Binding creates the socket with the mode that the umask leaves; within this scope it is never wider than 0660. The
// umask is the process's: use only while starting up.
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
// Receives one datagram without blocking. UNAVAILABLE: none is there. OUT_OF_RANGE: the peer closed (an empty datagram
// reads the same). INVALID_ARGUMENT: longer than limits::kMaxSessionMessageBytes or with more descriptors than
// limits::kMaxDescriptorsPerMessage; its descriptors are closed.
absl::StatusOr<Datagram> Receive(int socket);

// Sends one datagram, with `descriptor` riding along unless it is −1. Never blocks, never raises SIGPIPE.
// RESOURCE_EXHAUSTED: as many descriptors of this process's user are on their way as it may have open; later there may
// be fewer.
absl::Status Send(int socket, const std::string& bytes, int descriptor = -1);

}  // namespace ashlar::daemon
