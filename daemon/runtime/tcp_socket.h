// SPDX-License-Identifier: Apache-2.0
// TCP listeners and addresses.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/runtime/host_port.h"
#include "daemon/runtime/unix_socket.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// Binds and listens on the first available address of the host, IPv4 before IPv6; non-blocking. Accepted sockets use
// TCP_NODELAY. The listener has no path. Waits at most `patience` for a port in use. UNAVAILABLE if no address can be
// listened on.
absl::StatusOr<Listener> ListenTcp(const HostPort& at, storage::Nanos patience = 0);

// Returns the port of a bound TCP socket; 0 for any other socket.
uint16_t PortOf(int socket);
// Returns the remote address of a TCP socket as bytes, without the port; empty for other sockets.
std::string PeerAddress(int socket);

}  // namespace ashlar::daemon
