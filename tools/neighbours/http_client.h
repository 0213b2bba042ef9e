// SPDX-License-Identifier: Apache-2.0
// Connections to a port of loopback, as scrapers of metrics make them.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/descriptor.h"

namespace ashlar::neighbours {

// Non-blocking, maybe not yet connected. `receive_bytes`: of its buffer for what comes, 0: the system's. Invalid where
// the machine has no more descriptors or ports.
internal::Descriptor ConnectLoopback(uint16_t port, int receive_bytes = 0);

// GET /metrics: the answer with its head, all of it. DEADLINE_EXCEEDED: not within `patience`.
absl::StatusOr<std::string> ReadMetrics(uint16_t port, std::chrono::milliseconds patience);
absl::Status Scrape(uint16_t port, std::chrono::milliseconds patience);

}  // namespace ashlar::neighbours
