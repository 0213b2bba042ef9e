// SPDX-License-Identifier: Apache-2.0
// RemoteMemory: where granted bytes lie at their owner, for RDMA reads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ashlar::daemon {

// A registered area of the owner's memory, all of one tenant. Its key gives access to every byte while it is
// registered, so keys are sent over the authenticated control plane only, to peers that share the tenant.
struct RemoteArena {
  std::string key;  // packed by UCX
  uint64_t base = 0, bytes = 0;
};
struct RemoteRun {
  uint32_t arena = 0;  // index in the list
  uint64_t offset = 0, bytes = 0;
};
struct RemoteMemory {
  std::vector<RemoteArena> arenas;
  std::vector<RemoteRun> runs;  // all bytes of the grant, in order
};

// Finds the address of each byte. Runs must lie inside their arenas; the control plane has validated a peer's runs.
class RemotePlaces {
 public:
  struct Place {
    uint32_t arena = 0;
    uint64_t address = 0, bytes = 0;  // bytes to the end of the run
  };

  RemotePlaces() = default;
  explicit RemotePlaces(std::shared_ptr<const RemoteMemory> memory) : memory_(std::move(memory)) {
    for (const RemoteRun& run : memory_->runs) {
      starts_.push_back(bytes_);
      bytes_ += run.bytes;
    }
  }

  bool empty() const { return bytes_ == 0; }
  uint64_t bytes() const { return bytes_; }
  const RemoteMemory& memory() const { return *memory_; }
  Place At(uint64_t offset) const {  // offset must be less than bytes()
    const size_t i = std::upper_bound(starts_.begin(), starts_.end(), offset) - starts_.begin() - 1;
    const RemoteRun& run = memory_->runs[i];
    const uint64_t inside = offset - starts_[i];
    return {run.arena, memory_->arenas[run.arena].base + run.offset + inside, run.bytes - inside};
  }

 private:
  std::shared_ptr<const RemoteMemory> memory_;
  std::vector<uint64_t> starts_;
  uint64_t bytes_ = 0;
};

}  // namespace ashlar::daemon
