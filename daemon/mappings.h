// SPDX-License-Identifier: Apache-2.0
// CheckMappings: the kernel's limit on the mappings of a process (vm.max_map_count). Every arena is a mapping, and so
// is every region; beyond the limit the allocator gets no memory either, and the process dies. So the configuration
// bounds the mappings, and before anybody is served they are checked to fit beside those that the daemon itself needs.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Most mappings that a daemon of this configuration has: its arenas when the budgets are full, all regions that its
// tenants may have, its threads, connections with peers, and a reserve for code and the allocator.
uint64_t MappingsNeeded(const v1::Config& config);

// FAILED_PRECONDITION, naming what the configuration could change, where the machine's limit is lower. `root` stands
// before the path that is read; a limit that cannot be read is none.
absl::Status CheckMappings(const v1::Config& config, const std::string& root = "");

// Keeps the allocator within the reserve. Once, before there are threads: settings of the whole process.
void BoundAllocatorMappings();

}  // namespace ashlar::daemon
