// SPDX-License-Identifier: Apache-2.0
// RegisteredAreas: the areas of this process's memory that network cards may read for peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "daemon/peer/transport/grant.h"
#include "daemon/peer/transport/remote_memory.h"

namespace ashlar::daemon {

// Thread-safe.
class RegisteredAreas {
 public:
  void Add(std::byte* data, uint64_t bytes, std::string key);
  // Says where the spans lie. Without arenas where one of them is in no area, or there would be more than `most_arenas`
  // or `most_runs`: their bytes go by messages then.
  RemoteMemory Describe(const Spans& spans, size_t most_arenas, size_t most_runs) const;
  uint64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, RemoteArena> areas_;  // by their beginnings
  uint64_t bytes_ = 0;
};

}  // namespace ashlar::daemon
