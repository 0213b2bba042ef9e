// SPDX-License-Identifier: Apache-2.0
// Processes in a time namespace of their own: their CLOCK_MONOTONIC differs from that of all others.
#pragma once

#include <cstdint>

namespace ashlar::integration {

// Returns whether this machine lets this process create one.
bool MayMakeTimeNamespaces();

// For a child between fork and exec: continues in its own child whose clock is that many seconds ahead, and which ends
// with the calling process. The calling process waits for it and never returns. False: the namespace could not be
// created.
bool GoOnInTimeNamespace(int64_t seconds_ahead);

}  // namespace ashlar::integration
