// SPDX-License-Identifier: Apache-2.0
// Address filters: the kernel drops what other hosts send to a listening socket.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ashlar::daemon {

// The TCP sockets of this process that listen.
std::set<int> ListeningSockets();

// From now on the sockets, and all that are accepted from them, receive packets of these IPv4 addresses only: to others
// the port looks like one behind a firewall. INVALID_ARGUMENT: an address is none, or there are more than 1,000.
absl::Status AdmitOnly(const std::set<int>& sockets, const std::vector<std::string>& addresses);

}  // namespace ashlar::daemon
