// SPDX-License-Identifier: Apache-2.0
// AdminServer: serves the admin service by gRPC on its own Unix socket, for root and the daemon's user.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/admin/admin_service.h"
#include "daemon/admin/audit_log.h"
#include "daemon/runtime/refused_connections.h"

namespace ashlar::daemon {

// Calls block only the server's own threads, of which there are few.
class AdminServer {
 public:
  // `service`, `audit` and `refused` must outlive the server. `audit` logs every call that changes something.
  // ALREADY_EXISTS if another daemon listens on `path`.
  static absl::StatusOr<std::unique_ptr<AdminServer>> Start(const std::string& path, const AdminService& service,
                                                            AuditLog& audit, RefusedConnections& refused);
  // Refuses new calls, waits for those in flight, and removes the socket. The metadata thread must still run.
  ~AdminServer();

 private:
  struct Impl;
  explicit AdminServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
