// SPDX-License-Identifier: Apache-2.0
// A group of processes whose memory is limited, by whichever of the kernel's ways this machine has.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace ashlar::integration {

class MemoryGroup {
 public:
  // Null if a group cannot be created: not root, or no memory controller.
  static std::unique_ptr<MemoryGroup> Make(uint64_t limit_bytes);
  ~MemoryGroup();  // moves its processes back
  MemoryGroup(const MemoryGroup&) = delete;
  MemoryGroup& operator=(const MemoryGroup&) = delete;

  bool Add(pid_t pid);
  uint64_t Used() const;
  uint64_t Shared() const;  // part of Used(): memory files first touched by its processes

 private:
  MemoryGroup(std::string folder, std::string parent, std::string used)
      : folder_(std::move(folder)), parent_(std::move(parent)), used_(std::move(used)) {}
  const std::string folder_, parent_, used_;
};

}  // namespace ashlar::integration
