// SPDX-License-Identifier: Apache-2.0
// PeerProcess: the daemon's process, and whether it is certainly dead.
#pragma once

#include "absl/status/statusor.h"
#include "client/session/deadline.h"
#include "client/session/descriptor.h"

namespace ashlar::internal {

class PeerProcess {
 public:
  // `pidfd` is what the process has opened of itself and handed over. Its number would not do: it may be another
  // process's by now, and a process of another PID namespace has none here. INVALID_ARGUMENT: not a pidfd.
  static absl::StatusOr<PeerProcess> Of(Descriptor pidfd);

  PeerProcess() = default;  // no process; never dead

  // Readable once the process has ended; -1 for none.
  int pidfd() const { return pidfd_.get(); }

  // True only when the kernel says so: the process has ended and none of its threads can write any more.
  bool Dead() const;
  bool WaitDead(Deadline deadline) const;

 private:
  explicit PeerProcess(Descriptor pidfd) : pidfd_(std::move(pidfd)) {}

  Descriptor pidfd_;
};

}  // namespace ashlar::internal
