// SPDX-License-Identifier: Apache-2.0
// Numbers of open files and mappings of this process.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace ashlar::daemon {

inline size_t OpenFilesOfThisProcess() {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

inline size_t MappingsOfThisProcess() {
  std::ifstream maps("/proc/self/maps");
  return static_cast<size_t>(std::count(std::istreambuf_iterator<char>(maps), {}, '\n'));
}

}  // namespace ashlar::daemon
