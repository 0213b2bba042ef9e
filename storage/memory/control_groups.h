// SPDX-License-Identifier: Apache-2.0
// ControlGroups: the cgroups that limit this process, of either version.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ashlar::storage {

struct ControlGroup {
  std::string folder;  // its files
  int version = 2;     // of cgroups: file names differ
};
// The groups of the process for a controller ("memory", "pids"): its own and those above, of the unified hierarchy and
// of version 1. Folders need not exist. `root` stands before all paths.
std::vector<ControlGroup> ControlGroups(const std::string& controller, const std::string& root = "");

// The number in a file; nothing where the file says "max", or is not there.
std::optional<uint64_t> ReadNumber(const std::string& path);

}  // namespace ashlar::storage
