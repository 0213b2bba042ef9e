// SPDX-License-Identifier: Apache-2.0
// AdminServer: gRPC in front of the admin service, on a Unix socket of its own, for root and the daemon's own user.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/admin/admin_service.h"
#include "daemon/admin/audit_log.h"
#include "daemon/runtime/refused_connections.h"

namespace ashlar::daemon {

// Calls block its own threads, of which there are few, and nobody else's.
class AdminServer {
 public:
  // `service`, `audit`, which gets every call that changes something, and `refused` must outlive the server.
  // ALREADY_EXISTS when another daemon listens on `path`.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const std::string& path, const AdminService& service,
                                                            AuditLog& audit, RefusedConnections& refused);
  // Takes no new calls, awaits those in flight, for which the metadata thread must still run, and removes the socket.
  ~AdminServer();

 private:
  struct Impl;
  explicit AdminServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
