// SPDX-License-Identifier: Apache-2.0
// The daemon's sockets if no option names them.
#pragma once

#include <string>

namespace ashlar::ctl {

// The path of socket `file`, such as "admin.sock". The environment variable `variable` comes first; then /run/ashlar,
// if a daemon made the socket there; then, for users other than root, ashlar in $XDG_RUNTIME_DIR, where `python -m
// ashlar.daemon` puts them. Without any of these, the path in /run/ashlar. client/python/ashlar/sockets.py follows the
// same order.
std::string DefaultSocket(const char* variable, const std::string& file);

}  // namespace ashlar::ctl
