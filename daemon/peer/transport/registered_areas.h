// SPDX-License-Identifier: Apache-2.0
// RegisteredAreas: the memory areas of this process that are registered with UCX: those that peers may read by RDMA,
// and those that the CPU cannot write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>

#include "absl/status/status.h"
#include "daemon/peer/transport/grant.h"
#include "daemon/peer/transport/remote_memory.h"
#include "daemon/peer/transport/spans.h"
#include "daemon/peer/transport/transport.h"
#include "daemon/peer/transport/ucx.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// Used by the transport's thread, except where noted.
class RegisteredAreas {
 public:
  // An error says why peers cannot read the memory by RDMA. `copy_in` is null for memory that the CPU writes.
  absl::Status Register(Ucx& ucx, std::byte* data, uint64_t bytes, MemoryType type, Transport::CopyIn copy_in);
  // Returns whether CopyIn can fill the memory.
  bool CanCopyInto(const Ucx& ucx, const SpanList<std::byte>& targets) const;
  void CopyIn(std::byte* to, std::span<const std::byte> from) const;

  // Describes where the spans lie. The result has no arenas if a span is in no area, or if it would need more than
  // `most_arenas` or `most_runs`; the bytes are then sent by messages. Thread-safe.
  RemoteMemory Describe(const Spans& spans, size_t most_arenas, size_t most_runs) const;
  uint64_t bytes() const;  // readable by RDMA; thread-safe

 private:
  struct FarArea {
    uint64_t bytes = 0;
    Transport::CopyIn copy_in;
  };

  const Transport::CopyIn* WayInto(const std::byte* data) const;  // null for memory that the CPU writes

  std::map<const std::byte*, FarArea> far_areas_;  // areas that the CPU cannot write, by start address
  mutable Mutex mutex_;
  std::map<const std::byte*, RemoteArena> areas_ ABSL_GUARDED_BY(mutex_);  // key: start address
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ashlar::daemon
