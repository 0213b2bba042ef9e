// SPDX-License-Identifier: Apache-2.0
// HostPort: a TCP address in the configuration.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ashlar::daemon {

struct HostPort {
  std::string host;   // a name, or an IPv4 or IPv6 address without brackets
  uint16_t port = 0;  // 0: any free port
};
// Parses "127.0.0.1:9464", "localhost:9464" or "[::1]:9464". INVALID_ARGUMENT says what is expected.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view text);

}  // namespace ashlar::daemon
