// SPDX-License-Identifier: Apache-2.0
// RegisteredAreas: the memory areas of this process that peers may read by RDMA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "daemon/peer/transport/grant.h"
#include "daemon/peer/transport/remote_memory.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// Thread-safe.
class RegisteredAreas {
 public:
  void Add(std::byte* data, uint64_t bytes, std::string key);
  // Describes where the spans lie. The result has no arenas if a span is in no area, or if it would need more than
  // `most_arenas` or `most_runs`; the bytes are then sent by messages.
  RemoteMemory Describe(const Spans& spans, size_t most_arenas, size_t most_runs) const;
  uint64_t bytes() const;

 private:
  mutable Mutex mutex_;
  std::map<const std::byte*, RemoteArena> areas_ ABSL_GUARDED_BY(mutex_);  // key: start address
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ashlar::daemon
