// SPDX-License-Identifier: Apache-2.0
// TCP sockets by address.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/runtime/host_port.h"
#include "daemon/runtime/unix_socket.h"
#include "storage/executor.h"

namespace ashlar::daemon {

// Binds and listens at the first of the host's addresses that can be had, IPv4 before IPv6; non-blocking. Accepted
// sockets send without delay (TCP_NODELAY). The listener has no path. A port that is in use is waited for, at most for
// `patience`. UNAVAILABLE if no address can be listened on.
absl::StatusOr<Listener> ListenTcp(const HostPort& at, storage::Nanos patience = 0);

// Returns the port of a TCP socket that is bound; 0 for any other socket.
uint16_t PortOf(int socket);
// Returns the address that a TCP socket is connected to, without its port, as bytes; empty for a socket that has none.
std::string PeerAddress(int socket);

}  // namespace ashlar::daemon
