// SPDX-License-Identifier: Apache-2.0
// Changes bytes where no engine could.
#pragma once

#include <sys/types.h>

#include <string>

namespace ashlar::integration {

// Flips one bit of every copy of `pattern` in the daemon's arenas, to which no other process can write. Returns the
// number of copies.
int FlipInArenas(pid_t daemon, const std::string& pattern);

}  // namespace ashlar::integration
