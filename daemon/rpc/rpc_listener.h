// SPDX-License-Identifier: Apache-2.0
// RpcListener: accepts the RPC socket's connections, and bounds them for each user. gRPC alone would accept everybody.
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

// Users of tenants are engines. Any other user may ask for the daemon's health, and so gets connections too, but few:
// an orchestrator's probe makes one and is gone. Each user has its own number, so nobody's flood keeps another out; of
// strangers together there is a bound as well, and there the newest are let in.
class RpcListener {
 public:
  // An engine has one for its calls. It makes another when that breaks, before the daemon sees the end of the first,
  // and operators' tools make some.
  static constexpr size_t kOfASession = 4;
  // Descriptors that the daemon has open for a connection: the listener's, and gRPC's.
  static constexpr size_t kDescriptors = 2;
  static constexpr size_t kOfAStranger = 8;   // connections of one user of no tenant
  static constexpr size_t kOfStrangers = 64;  // of all of them: the oldest gives way

  struct Options {
    std::map<uid_t, storage::TenantId> tenant_of_uid;
    size_t of_a_user = 0;  // connections of one user of a tenant; more are closed at once
    // Called for each that is closed so, on the listener's thread.
    std::function<void(uid_t uid, bool stranger)> refused;
    mode_t mode = kEngineSocketMode;
  };
  // Takes a connection: non-blocking, from `user`. Users who belong to no tenant are strangers. On the listener's
  // thread.
  using Admit = std::function<void(UniqueFd socket, uid_t user)>;

  // ALREADY_EXISTS when another daemon listens on `path`.
  static absl::StatusOr<std::unique_ptr<RpcListener>> Start(const std::string& path, Options options, Admit admit);
  // Accepts no more and removes the socket. Connections stay as they are.
  ~RpcListener();

 private:
  struct Impl;
  explicit RpcListener(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
