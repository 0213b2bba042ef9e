// SPDX-License-Identifier: Apache-2.0
// CheckMappings: checks the kernel's limit on the mappings of a process (vm.max_map_count).
//
// Every arena and every region is a mapping. At the limit the allocator gets no memory either, and the process dies. So
// the configuration bounds the mappings, and the daemon checks at startup that they fit together with its own.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Returns the largest number of mappings of a daemon with this configuration: arenas with full budgets, regions of all
// tenants, threads, connections to peers, and a reserve for code and the allocator.
uint64_t MappingsNeeded(const v1::Config& config);

// FAILED_PRECONDITION if the machine's limit is lower; the message names the fields to change. `root` is prepended to
// the path that is read. A limit that cannot be read is ignored.
absl::Status CheckMappings(const v1::Config& config, const std::string& root = "");

// Keeps the allocator within the reserve. The settings affect the whole process. Call once, before starting threads.
void BoundAllocatorMappings();

}  // namespace ashlar::daemon
