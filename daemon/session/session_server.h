// SPDX-License-Identifier: Apache-2.0
// SessionServer: the session socket. It accepts engines, sends them descriptors, and notices when they exit.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/session/session_protocol.h"

namespace ashlar::daemon {

// One thread serves all session sockets. A session ends with its socket, or when the process that opened it exits,
// because a forked child may keep the socket open.
class SessionServer {
 public:
  // `services` must outlive the server. ALREADY_EXISTS if another daemon listens on `path`.
  static absl::StatusOr<std::unique_ptr<SessionServer>> Start(const std::string& path, uint32_t max_sessions,
                                                              SessionServices& services);
  // Ends every session and removes the socket.
  ~SessionServer();

  // Sets whether an engine's hello opens a session; initially it does. Otherwise the reply is UNAVAILABLE. Any thread.
  void SetAdmitting(bool admitting);
  // Refuses new sessions from now on.
  void StopAccepting();

 private:
  struct Impl;
  explicit SessionServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
