// SPDX-License-Identifier: Apache-2.0
// gRPC's threads: their number, and starting them in advance.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace ashlar::daemon {

// The largest number of gRPC threads in this process.
uint64_t GrpcThreads();

// Starts the threads that gRPC would otherwise start under load. If gRPC fails to start a thread later, it still counts
// it, and closures for that thread never run: calls and the daemon's stop hang. gRPC stays initialized until the
// process exits, because its shutdown waits for such threads too. RESOURCE_EXHAUSTED if not all could be started.
absl::Status ReserveGrpcThreads();

}  // namespace ashlar::daemon
