// SPDX-License-Identifier: Apache-2.0
// The process that listens on a Unix socket, or the reason why a client cannot reach it.
#pragma once

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"

namespace ashlar::ctl {

// The process that listens on the socket; 0 if it is not visible from here, as in a container. The errors name the path
// and the remedy. NOT_FOUND: there is no socket; UNAVAILABLE: nothing listens; PERMISSION_DENIED: not for this user;
// INVALID_ARGUMENT: the path is not a socket.
absl::StatusOr<pid_t> ListenerOf(const std::string& path);

}  // namespace ashlar::ctl
