// SPDX-License-Identifier: Apache-2.0
// ConnectUnix: connects to a Unix socket, within a deadline and until told to stop.
#pragma once

#include <stop_token>
#include <string>

#include "absl/status/statusor.h"
#include "client/session/deadline.h"
#include "client/session/descriptor.h"

namespace ashlar::internal {

// A connected, non-blocking socket of `type` (SOCK_STREAM, SOCK_SEQPACKET), closed on exec. UNAVAILABLE: no process
// listens.
absl::StatusOr<Descriptor> ConnectUnix(const std::string& path, int type, Deadline deadline,
                                       const std::stop_token& stop = {});

// A socket that is closed in forked children. The daemon detects the engine's death by the end of the session's socket,
// and a copy in a child would hide it. Closes the socket on destruction.
class ForkClosedSocket {
 public:
  static absl::StatusOr<ForkClosedSocket> Connect(const std::string& path, int type, Deadline deadline,
                                                  const std::stop_token& stop = {});
  ForkClosedSocket() = default;
  ForkClosedSocket(ForkClosedSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ForkClosedSocket& operator=(ForkClosedSocket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~ForkClosedSocket();

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

}  // namespace ashlar::internal
