// SPDX-License-Identifier: Apache-2.0
// Address filters: let the kernel drop packets of other hosts to a listening socket.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ashlar::daemon {

// Returns the listening TCP sockets of this process.
std::set<int> ListeningSockets();

// From now on the sockets, and all connections accepted from them, receive only packets from these IPv4 addresses. To
// other hosts the port looks firewalled. INVALID_ARGUMENT for an invalid address, or for more than 1,000.
absl::Status AdmitOnly(const std::set<int>& sockets, const std::vector<std::string>& addresses);

}  // namespace ashlar::daemon
