// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/listener.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace ashlar::ctl {
namespace {

absl::Status Explained(const std::string& path, int error) {
  struct stat status {};
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(
          absl::StrCat("no daemon answers on ", path,
                       ": the socket does not exist; start the daemon, or give the path of its socket"));
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(
          absl::StrCat(path, ": permission denied; run ashlarctl as root or as the daemon's user"));
    case ECONNREFUSED:
      if (stat(path.c_str(), &status) == 0 && !S_ISSOCK(status.st_mode)) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": not a socket; give the path of the daemon's socket"));
      }
      return absl::UnavailableError(absl::StrCat("no daemon answers on ", path,
                                                 ": the daemon that created this socket has exited; start it again"));
    case EPROTOTYPE:
      return absl::InvalidArgumentError(absl::StrCat(
          path, ": wrong socket type, such as listen.session_socket; give listen.admin_socket or listen.rpc_socket"));
    default:
      return absl::UnavailableError(absl::StrCat("no daemon answers on ", path, ": ", std::strerror(error)));
  }
}

}  // namespace

absl::StatusOr<pid_t> ListenerOf(const std::string& path) {
  sockaddr_un address{.sun_family = AF_UNIX};
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not a socket path; expected 1 to ", sizeof address.sun_path - 1, " bytes"));
  }
  path.copy(address.sun_path, path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return absl::ErrnoToStatus(errno, "socket");
  const absl::Cleanup closing = [fd] { close(fd); };
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return Explained(path, errno);
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return absl::ErrnoToStatus(errno, path);
  return access(absl::StrCat("/proc/", peer.pid, "/limits").c_str(), R_OK) == 0 ? peer.pid : 0;
}

}  // namespace ashlar::ctl
