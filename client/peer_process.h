// The process at the other end of a Unix socket, and whether it is certainly dead.
#pragma once

#include <sys/types.h>

#include "client/deadline.h"
#include "client/descriptor.h"

namespace ashlar::internal {

class PeerProcess {
 public:
  // The process that listens at the other end of a connected socket. An answer that arrives over the socket later
  // proves that the process named here was alive when this was called, so its number cannot have been another's.
  static PeerProcess Of(int socket);

  pid_t pid() const { return pid_; }
  // Readable once the process has ended; -1 where the kernel has no pidfd.
  int pidfd() const { return pidfd_.get(); }

  // True only when the kernel says so: the process has ended and none of its threads can write any more. False also
  // when that cannot be known.
  bool Dead() const;
  bool WaitDead(Deadline deadline) const;

 private:
  pid_t pid_ = 0;
  Descriptor pidfd_;
};

}  // namespace ashlar::internal
