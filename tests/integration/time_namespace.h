// Processes in a time namespace of their own: their CLOCK_MONOTONIC shows something else than everybody's.
#pragma once

#include <cstdint>

namespace ashlar::integration {

// Whether this machine lets this process make one.
bool MayMakeTimeNamespaces();

// For a child between fork and exec: goes on in a child of its own whose clock is that many seconds ahead, and which
// ends with the calling process; that one waits for it and never returns. False: none could be made.
bool GoOnInTimeNamespace(int64_t seconds_ahead);

}  // namespace ashlar::integration
