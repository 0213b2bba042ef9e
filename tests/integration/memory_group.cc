// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/memory_group.h"

#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <vector>

namespace ashlar::integration {
namespace {

struct Hierarchy {
  const char *line, *root, *limit, *used;  // line: the text before the group in /proc/self/cgroup
};
constexpr std::array<Hierarchy, 2> kHierarchies = {
    Hierarchy{":memory:", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"},
    Hierarchy{"0::", "/sys/fs/cgroup", "memory.max", "memory.current"}};

bool Write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << std::flush;
  return file.good();
}

}  // namespace

std::unique_ptr<MemoryGroup> MemoryGroup::Make(uint64_t limit_bytes) {
  for (const Hierarchy& hierarchy : kHierarchies) {
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
      const size_t at = line.find(hierarchy.line);
      if (at == std::string::npos) continue;
      const std::string parent = hierarchy.root + line.substr(at + std::string(hierarchy.line).size());
      const std::string folder = parent + "/ashlar-test-" + std::to_string(::getpid());
      std::error_code error;
      if (!std::filesystem::create_directory(folder, error) || error) continue;
      std::unique_ptr<MemoryGroup> group(new MemoryGroup(folder, parent, folder + "/" + hierarchy.used));
      if (Write(folder + "/" + hierarchy.limit, std::to_string(limit_bytes))) return group;
    }
  }
  return nullptr;
}

MemoryGroup::~MemoryGroup() {
  std::vector<std::string> pids;
  std::ifstream processes(folder_ + "/cgroup.procs");
  for (std::string pid; std::getline(processes, pid);) pids.push_back(pid);
  for (const std::string& pid : pids) Write(parent_ + "/cgroup.procs", pid);
  ::rmdir(folder_.c_str());
}

bool MemoryGroup::Add(pid_t pid) {
  return Write(folder_ + "/cgroup.procs", std::to_string(pid));
}

uint64_t MemoryGroup::Used() const {
  uint64_t bytes = 0;
  std::ifstream(used_) >> bytes;
  return bytes;
}

uint64_t MemoryGroup::Shared() const {
  std::ifstream counts(folder_ + "/memory.stat");
  uint64_t bytes = 0;
  for (std::string name; counts >> name >> bytes;) {
    if (name == "shmem") return bytes;
  }
  return 0;
}

}  // namespace ashlar::integration
