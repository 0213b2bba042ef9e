// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime/host_port.h"

#include "absl/strings/numbers.h"

namespace ashlar::daemon {

absl::StatusOr<HostPort> ParseHostPort(absl::string_view text) {
  const absl::Status bad = absl::InvalidArgumentError("expected host:port, or [address]:port for IPv6");
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(text.substr(colon + 1), &port) || port > UINT16_MAX) {
    return bad;
  }
  absl::string_view host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find_first_of("[]:") != absl::string_view::npos) {
    return bad;
  }
  if (host.empty() || host.find('\0') != absl::string_view::npos) return bad;
  return HostPort{std::string(host), static_cast<uint16_t>(port)};
}

}  // namespace ashlar::daemon
