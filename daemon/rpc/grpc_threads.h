// SPDX-License-Identifier: Apache-2.0
// gRPC's threads: their number, and starting them ahead.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace ashlar::daemon {

// The most threads that gRPC has in this process at a time.
uint64_t GrpcThreads();

// Starts the threads that gRPC would otherwise start under load. When gRPC cannot start one of them later, it still
// counts it: closures that are given to it never run, calls and the daemon's stop hang. gRPC stays initialized until
// the process exits, because its end waits for such threads, too. RESOURCE_EXHAUSTED: not all could be started.
absl::Status ReserveGrpcThreads();

}  // namespace ashlar::daemon
