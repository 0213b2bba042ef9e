// SPDX-License-Identifier: Apache-2.0
// DiskHealth: tells the log and gRPC's health service when the ssd tier becomes degraded, and when it recovers.
#pragma once

#include <optional>
#include <string>

namespace ashlar::daemon {

class RpcServer;

class DiskHealth {
 public:
  // `error`: why it is degraded; empty: it is not. `server`: null until there is one; it is told once it is there.
  void Tell(const std::string& error, RpcServer* server);

 private:
  bool degraded_ = false;     // as the log has it
  std::optional<bool> told_;  // as health has it
};

}  // namespace ashlar::daemon
