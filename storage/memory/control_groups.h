// SPDX-License-Identifier: Apache-2.0
// ControlGroups: the cgroups that limit this process, of either version.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ashlar::storage {

struct ControlGroup {
  std::string folder;  // its directory
  int version = 2;     // cgroup version; file names differ
};
// Returns the process's groups for a controller ("memory", "pids"): its own and their parents, of the unified hierarchy
// and of version 1. The directories may be missing. `root` is prepended to all paths.
std::vector<ControlGroup> ControlGroups(const std::string& controller, const std::string& root = "");

// Returns the number in a file; nothing if the file says "max" or is missing.
std::optional<uint64_t> ReadNumber(const std::string& path);

}  // namespace ashlar::storage
