// TCP sockets by address: reading one from a configuration, and listening there.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/unix_socket.h"

namespace ashlar::daemon {

struct HostPort {
  std::string host;   // a name, or an IPv4 or IPv6 address without brackets
  uint16_t port = 0;  // 0: any that is free
};
// "127.0.0.1:9464", "localhost:9464", "[::1]:9464". INVALID_ARGUMENT says what is expected.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view text);

// Binds and listens at the first of the host's addresses that can be had, IPv4 before IPv6; non-blocking. The listener
// has no path. UNAVAILABLE when none can.
absl::StatusOr<Listener> ListenTcp(const HostPort& at);

// Of a TCP socket that is bound; 0 for any other.
uint16_t PortOf(int socket);
// The address that a TCP socket is connected to, without its port, as bytes; empty for a socket that has none.
std::string PeerAddress(int socket);

}  // namespace ashlar::daemon
