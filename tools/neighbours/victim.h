// SPDX-License-Identifier: Apache-2.0
// The engine that others' attacks must not reach: it matches, lands and releases one segment, again and again.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/session/client.h"
#include "nlohmann/json.hpp"
#include "tools/neighbours/segment_engine.h"

namespace ashlar::neighbours {

class Victim {
 public:
  static absl::StatusOr<std::unique_ptr<Victim>> Open(const ClientOptions& daemon);

  struct Newcomers {
    bool any = false;           // open a session with a model, a region and an arena every second
    uint16_t metrics_port = 0;  // port of the metrics endpoint to scrape every second; 0: none
  };
  // Rounds one behind the other. p50_ms, p99_ms and max_ms of those that were served; served, refused: rounds and what
  // newcomers asked for; newcomer_max_ms, scrape_max_ms; why: of the first refusal.
  nlohmann::json Measure(std::chrono::duration<double> span, const Newcomers& newcomers);

 private:
  explicit Victim(const ClientOptions& daemon) : daemon_(daemon) {}

  const ClientOptions daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<SegmentEngine> engine_;
};

}  // namespace ashlar::neighbours
