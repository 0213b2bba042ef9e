// SPDX-License-Identifier: Apache-2.0
// PeerProcess: the daemon's process, and whether it is certainly dead.
#pragma once

#include "absl/status/statusor.h"
#include "client/session/deadline.h"
#include "client/session/descriptor.h"

namespace ashlar::internal {

class PeerProcess {
 public:
  // `pidfd` is a pidfd that the process has opened for itself and sent. A process number is not enough: it may be
  // reused, and a process of another PID namespace has no number here. INVALID_ARGUMENT: not a pidfd.
  static absl::StatusOr<PeerProcess> Of(Descriptor pidfd);

  PeerProcess() = default;  // no process; never dead

  // Readable once the process has ended; -1: none.
  int pidfd() const { return pidfd_.get(); }

  // True only if the kernel confirms that the process has ended and none of its threads can write any longer.
  bool Dead() const;
  bool WaitDead(Deadline deadline) const;

 private:
  explicit PeerProcess(Descriptor pidfd) : pidfd_(std::move(pidfd)) {}

  Descriptor pidfd_;
};

}  // namespace ashlar::internal
