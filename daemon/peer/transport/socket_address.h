// SPDX-License-Identifier: Apache-2.0
// Conversions of socket addresses for UCX.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/runtime/host_port.h"

namespace ashlar::daemon {

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

// INVALID_ARGUMENT if the host is a name or empty.
absl::StatusOr<SocketAddress> ToSocketAddress(const HostPort& at);
uint16_t PortOf(const sockaddr_storage& address);
std::string ToText(const sockaddr_storage& address);  // "192.0.2.1:80", "[2001:db8::1]:80"

}  // namespace ashlar::daemon
