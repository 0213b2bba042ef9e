// SPDX-License-Identifier: Apache-2.0
// Connections to a loopback port, like those of metrics scrapers.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/descriptor.h"

namespace ashlar::neighbours {

// Non-blocking, possibly not yet connected. `receive_bytes`: size of its receive buffer; 0: the system's default.
// Invalid if the machine has no more descriptors or ports.
internal::Descriptor ConnectLoopback(uint16_t port, int receive_bytes = 0);

// GET /metrics: the whole answer with its header. DEADLINE_EXCEEDED: not within `patience`.
absl::StatusOr<std::string> ReadMetrics(uint16_t port, std::chrono::milliseconds patience);
absl::Status Scrape(uint16_t port, std::chrono::milliseconds patience);

}  // namespace ashlar::neighbours
