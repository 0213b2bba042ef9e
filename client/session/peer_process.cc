// SPDX-License-Identifier: Apache-2.0
#include "client/session/peer_process.h"

#include <poll.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ashlar::internal {

absl::StatusOr<PeerProcess> PeerProcess::Of(Descriptor pidfd) {
  // Almost any other file is always readable, which would look like the process's death. waitid recognizes a pidfd,
  // without /proc and in any namespace: ECHILD means a process that is not our child. If it is our child (a test's
  // daemon), WNOWAIT leaves it to its waiter.
  siginfo_t unused;
  if (::waitid(P_PIDFD, static_cast<id_t>(pidfd.get()), &unused, WEXITED | WNOHANG | WNOWAIT) != 0 && errno != ECHILD) {
    return absl::InvalidArgumentError(absl::StrCat("not a pidfd: ", std::strerror(errno)));
  }
  return PeerProcess(std::move(pidfd));
}

bool PeerProcess::Dead() const {
  return WaitDead(Deadline());
}

bool PeerProcess::WaitDead(Deadline deadline) const {
  struct pollfd end = {.fd = pidfd_.get(), .events = POLLIN, .revents = 0};  // -1 is never ready
  do {
    if (::poll(&end, 1, PollTimeout(deadline)) > 0) return (end.revents & POLLIN) != 0;
  } while (!Passed(deadline));
  return false;
}

}  // namespace ashlar::internal
