// SPDX-License-Identifier: Apache-2.0
// HttpEndpoint: the daemon's HTTP routes (/, /metrics, /healthz, /readyz) on the listeners that a configuration asks
// for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/observe/http_server.h"
#include "daemon/observe/metrics.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// An orchestrator's questions, asked on the server's thread.
struct Probes {
  std::function<bool()> alive;           // false: the daemon should be started anew
  std::function<std::string()> unready;  // why engines should not be sent to it; empty: they should
};

class HttpEndpoint {
 public:
  // Null if the configuration asks for no listener. `metrics`, and the data of `probes`, must outlive the endpoint. An
  // error of a listener names the configuration's field.
  static absl::StatusOr<std::unique_ptr<HttpEndpoint>> Start(const v1::Config& config, const Metrics& metrics,
                                                             const Probes& probes);

  uint16_t port() const { return port_; }  // of listen.metrics_address; 0: none

 private:
  HttpEndpoint(std::unique_ptr<HttpServer> server, uint16_t port) : server_(std::move(server)), port_(port) {}

  const std::unique_ptr<HttpServer> server_;
  const uint16_t port_;
};

}  // namespace ashlar::daemon
