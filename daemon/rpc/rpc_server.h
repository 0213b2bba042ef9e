// SPDX-License-Identifier: Apache-2.0
// RpcServer: gRPC in front of the engine service: the callback API and the standard health service, on a Unix socket.
//
// Every user of a tenant has a gRPC server of its own, so that the service knows the user of each call. The servers of
// one tenant share one bound on memory for messages under way. Users of no tenant share one server, which answers for
// the daemon's health and nothing else. When gRPC runs short of memory it ends calls and connections of that tenant
// only.
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
  // `service`, `metrics` and `refused` must outlive the server. ALREADY_EXISTS when another daemon listens on `path`.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(const std::string& path, RpcListener::Options options,
                                                          EngineService& service, Metrics& metrics,
                                                          RefusedConnections& refused);
  // Stop(0).
  ~RpcServer();

  // Sets the health service's answer: SERVING at first. Calls are taken in either case. Any thread.
  void SetServing(bool serving);
  // Sets its answer for a service of another name, as long as the daemon serves. Any thread.
  void SetServing(const std::string& service, bool serving);
  // Takes no new calls, lets those in flight finish for at most `grace`, then cancels and awaits them. Meanwhile the
  // health service answers NOT_SERVING. Removes the socket. The engine service must still answer.
  void Stop(storage::Nanos grace);

 private:
  struct Impl;
  explicit RpcServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
