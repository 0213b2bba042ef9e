// SPDX-License-Identifier: Apache-2.0
// The engine that attacks must not affect: it matches, lands and releases one segment repeatedly.
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
  // Rounds one after another. p50_ms, p99_ms and max_ms of the served ones; served, refused: rounds and newcomers'
  // requests; newcomer_max_ms, scrape_max_ms; why: the reason of the first refusal.
  nlohmann::json Measure(std::chrono::duration<double> span, const Newcomers& newcomers);

 private:
  explicit Victim(const ClientOptions& daemon) : daemon_(daemon) {}

  const ClientOptions daemon_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<SegmentEngine> engine_;
};

}  // namespace ashlar::neighbours
