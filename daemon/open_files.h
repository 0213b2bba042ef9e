// SPDX-License-Identifier: Apache-2.0
// RaiseOpenFilesLimit: the process's limit on open files. Every arena is an open file, and so is every connection.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Most files that a daemon of this configuration has open: its arenas when the budgets are full, regions, hosted
// memory, some for each session, connections with peers, and its own. No more descriptors than that are on their way to
// engines, either.
uint64_t OpenFilesNeeded(const v1::Config& config);

// Raises the soft limit to the hard one. FAILED_PRECONDITION, naming what the configuration could change, when that is
// not enough: without descriptors for more arenas the cache would stop growing below its budget.
absl::Status RaiseOpenFilesLimit(const v1::Config& config);

}  // namespace ashlar::daemon
