// SPDX-License-Identifier: Apache-2.0
// SessionServer: the session socket. It accepts engines, hands descriptors over, and notices the engines' deaths.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/session/session_protocol.h"

namespace ashlar::daemon {

// A thread that serves all session sockets. A session ends with its socket, or when the kernel says that the process
// that opened it is dead: a forked child may keep the socket open for longer.
class SessionServer {
 public:
  // `services` must outlive the server. ALREADY_EXISTS when another daemon listens on `path`.
  static absl::StatusOr<std::unique_ptr<SessionServer>> Start(const std::string& path, uint32_t max_sessions,
                                                              SessionServices& services);
  // Ends every session and removes the socket.
  ~SessionServer();

  // Whether engines that say hello get a session: at first they do. Otherwise they are answered UNAVAILABLE. Any
  // thread.
  void SetAdmitting(bool admitting);
  // No new sessions from here on.
  void StopAccepting();

 private:
  struct Impl;
  explicit SessionServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
