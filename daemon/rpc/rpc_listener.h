// SPDX-License-Identifier: Apache-2.0
// RpcListener: accepts connections on the RPC socket, and limits them per user. gRPC alone accepts everything.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/runtime/unique_fd.h"
#include "daemon/runtime/unix_socket.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// Users of tenants are engines. Other users may ask for the daemon's health, so they get a few connections: an
// orchestrator's probe makes one and disconnects. Each user has its own limit, so one user cannot lock another out.
// Users without a tenant also share a limit, under which the newest connections win.
class RpcListener {
 public:
  // An engine has one connection for its calls. It opens another when that breaks, possibly before the daemon notices,
  // and operators' tools open some.
  static constexpr size_t kOfASession = 4;
  // Descriptors per connection: the listener's and gRPC's.
  static constexpr size_t kDescriptors = 2;
  static constexpr size_t kPerUnknownUser = 8;  // connections of one user without a tenant
  // connections of all users without a tenant; beyond that, the oldest is closed
  static constexpr size_t kMaxUnknownUserConnections = 64;

  struct Options {
    std::map<uid_t, storage::TenantId> tenant_of_uid;
    size_t of_a_user = 0;  // connections of one user of a tenant; more are closed immediately
    // Called on the listener's thread for each connection that is closed because of a limit.
    std::function<void(uid_t uid, bool unknown_user)> refused;
    mode_t mode = kEngineSocketMode;
  };
  // Takes a non-blocking connection from `user`, which may have no tenant. Runs on the listener's thread.
  using Admit = std::function<void(UniqueFd socket, uid_t user)>;

  // ALREADY_EXISTS if another daemon listens on `path`.
  static absl::StatusOr<std::unique_ptr<RpcListener>> Start(const std::string& path, Options options, Admit admit);
  // Stops accepting, and removes the socket. Open connections are not affected.
  ~RpcListener();

 private:
  struct Impl;
  explicit RpcListener(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
