// SPDX-License-Identifier: Apache-2.0
// RaiseOpenFilesLimit: raises the process's limit on open files. Every arena and every connection is an open file.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Returns the largest number of files that a daemon with this configuration has open: arenas with full budgets,
// regions, hosted memory, several per session, connections to peers, and its own. It also bounds the descriptors in
// flight to engines.
uint64_t OpenFilesNeeded(const v1::Config& config);

// Raises the soft limit to the hard limit. FAILED_PRECONDITION if that is not enough; the message names the fields to
// change. Without descriptors for more arenas, the cache would stop growing below its budget.
absl::Status RaiseOpenFilesLimit(const v1::Config& config);

}  // namespace ashlar::daemon
