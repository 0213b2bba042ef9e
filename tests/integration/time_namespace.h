// SPDX-License-Identifier: Apache-2.0
// Processes in a time namespace of their own: their CLOCK_MONOTONIC differs from that of all others.
#pragma once

#include <cstdint>

namespace ashlar::integration {

// Returns whether this machine lets this process make one.
bool MayMakeTimeNamespaces();

// For a child between fork and exec: continues in a child of its own whose clock is that many seconds ahead, and which
// ends with the calling process. The calling process waits for it and never returns. False: no namespace could be made.
bool GoOnInTimeNamespace(int64_t seconds_ahead);

}  // namespace ashlar::integration
