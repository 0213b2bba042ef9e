// SPDX-License-Identifier: Apache-2.0
// Checks limits on threads. A daemon starts all its threads at startup, so a limit that is too low is noticed there.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Threads that move bytes. Each takes a job from the queue and spreads it over all workers; the second fills the gaps
// of the first. The spare ones run jobs of tenants whose turn it is while other tenants' jobs take long; otherwise they
// sleep.
inline constexpr int kMovingThreads = 2, kMostSpareThreads = 30;

// Returns the largest number of threads of a daemon with this configuration, including those of its libraries.
uint64_t ThreadsNeeded(const v1::Config& config);

// FAILED_PRECONDITION names the limit if the process may not start that many: that of the cgroup (pids.max), the user
// (RLIMIT_NPROC) or the machine (kernel.threads-max, kernel.pid_max). `root` is prepended to the paths that are read.
absl::Status CheckThreads(const v1::Config& config, const std::string& root = "");

}  // namespace ashlar::daemon
