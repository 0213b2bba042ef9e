// SPDX-License-Identifier: Apache-2.0
// HttpEndpoint: serves the daemon's HTTP routes (/, /metrics, /healthz, /readyz) on the configured listeners.
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

// Callbacks for probes, run on the server's thread.
struct Probes {
  std::function<bool()> alive;           // false if the daemon should be restarted
  std::function<std::string()> unready;  // why engines should not be sent here; empty if ready
};

class HttpEndpoint {
 public:
  // Returns null without a configured listener. `metrics`, and what `probes` use, must outlive the endpoint. A
  // listener's error names the configuration field.
  static absl::StatusOr<std::unique_ptr<HttpEndpoint>> Start(const v1::Config& config, const Metrics& metrics,
                                                             const Probes& probes);

  uint16_t port() const { return port_; }  // port of listen.metrics_address; 0 without one

 private:
  HttpEndpoint(std::unique_ptr<HttpServer> server, uint16_t port) : server_(std::move(server)), port_(port) {}

  const std::unique_ptr<HttpServer> server_;
  const uint16_t port_;
};

}  // namespace ashlar::daemon
