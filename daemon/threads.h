// SPDX-License-Identifier: Apache-2.0
// Limits on threads: a daemon starts all its threads when it starts, so a limit that is too low shows there.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Threads that move bytes. Each takes jobs from the queue and spreads every one over all workers; the second fills the
// gaps of the first. The spare ones are for tenants whose turn it is while others' jobs take long; otherwise they
// sleep.
inline constexpr int kMovingThreads = 2, kMostSpareThreads = 30;

// The most threads that a daemon with this configuration has at a time, those of its libraries included.
uint64_t ThreadsNeeded(const v1::Config& config);

// FAILED_PRECONDITION, naming the limit, when the process may not start that many: the cgroup's (pids.max), the user's
// (RLIMIT_NPROC), or the machine's (kernel.threads-max, kernel.pid_max). `root` stands before the paths that are read.
absl::Status CheckThreads(const v1::Config& config, const std::string& root = "");

}  // namespace ashlar::daemon
