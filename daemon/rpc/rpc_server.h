// SPDX-License-Identifier: Apache-2.0
// RpcServer: serves the engine service and the standard health service by gRPC's callback API on a Unix socket.
//
// Every user of a tenant has its own gRPC server, so that the service knows the user of each call. The servers of one
// tenant share a limit on the memory of messages in flight. Users without a tenant share one server, which only serves
// the health service. If gRPC runs out of memory, it ends calls and connections of that tenant only.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/engine/engine_service.h"
#include "daemon/observe/metrics.h"
#include "daemon/rpc/rpc_listener.h"
#include "daemon/runtime/refused_connections.h"
#include "storage/executor.h"

namespace ashlar::daemon {

class RpcServer {
 public:
  // `service`, `metrics` and `refused` must outlive the server. ALREADY_EXISTS if another daemon listens on `path`.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const std::string& path, RpcListener::Options options,
                                                          EngineService& service, Metrics& metrics,
                                                          RefusedConnections& refused);
  // Stop(0).
  ~RpcServer();

  // Sets the state in the health service; initially SERVING. Calls are accepted in either state. Any thread.
  void SetServing(bool serving);
  // Sets the state of another service name while the daemon is serving. Any thread.
  void SetServing(const std::string& service, bool serving);
  // Refuses new calls, waits at most `grace` for calls in flight, then cancels the rest and waits for them. The health
  // service answers NOT_SERVING meanwhile. Removes the socket. The engine service must still answer.
  void Stop(storage::Nanos grace);

 private:
  struct Impl;
  explicit RpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
