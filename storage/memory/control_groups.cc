// SPDX-License-Identifier: Apache-2.0
#include "storage/memory/control_groups.h"

#include <algorithm>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ashlar::storage {
namespace {

// Returns the process's group, "/" or "/a/b", in the hierarchy of that version.
std::optional<std::string> ReadGroup(const std::string& path, int version, const std::string& controller) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() < 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    const bool unified = parts[0] == "0" && parts[1].empty();
    if (version == 2 ? unified : std::ranges::count(controllers, controller) > 0) return std::string(parts[2]);
  }
  return std::nullopt;
}

}  // namespace

std::vector<ControlGroup> ControlGroups(const std::string& controller, const std::string& root) {
  std::vector<ControlGroup> groups;
  for (const int version : {2, 1}) {
    const std::string hierarchy = absl::StrCat(root, "/sys/fs/cgroup", version == 1 ? "/" + controller : "");
    std::optional<std::string> group = ReadGroup(root + "/proc/self/cgroup", version, controller);
    while (group && group->starts_with('/')) {
      groups.push_back({hierarchy + (*group == "/" ? "" : *group), version});
      if (*group == "/") break;
      group->resize(std::max<size_t>(group->rfind('/'), 1));
    }
  }
  return groups;
}

std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  uint64_t value = 0;
  if (!(file >> word) || !absl::SimpleAtoi(word, &value)) return std::nullopt;
  return value;
}

}  // namespace ashlar::storage
