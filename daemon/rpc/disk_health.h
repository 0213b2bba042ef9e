// SPDX-License-Identifier: Apache-2.0
// DiskHealth: reports to the log and to gRPC's health service when the ssd tier becomes degraded and when it recovers.
#pragma once

#include <optional>
#include <string>

namespace ashlar::daemon {

class RpcServer;

class DiskHealth {
 public:
  // `error` is why the tier is degraded; empty if it is not. `server` may be null until it exists; it then gets the
  // current state.
  void Report(const std::string& error, RpcServer* server);

 private:
  bool degraded_ = false;         // state in the log
  std::optional<bool> reported_;  // state in the health service
};

}  // namespace ashlar::daemon
