// SPDX-License-Identifier: Apache-2.0
// RemoteMemory: where the bytes behind a grant lie at their owner, for a network card that reads them there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ashlar::daemon {

// A registered piece of the owner's memory, all of one tenant. Its key opens every byte of it, as long as it is
// registered: keys travel over the authenticated control plane only, to peers that share the tenant.
struct RemoteArena {
  std::string key;  // as UCX packs it
  uint64_t base = 0, bytes = 0;
};
struct RemoteRun {
  uint32_t arena = 0;  // in the list
  uint64_t offset = 0, bytes = 0;
};
struct RemoteMemory {
  std::vector<RemoteArena> arenas;
  std::vector<RemoteRun> runs;  // all bytes of the grant, in order
};

// Finds the place of each byte. Runs must lie inside their arenas: of what a peer says, the control plane has seen to
// it.
class RemotePlaces {
 public:
  struct Place {
    uint32_t arena = 0;
    uint64_t address = 0, bytes = 0;  // to the end of the run
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
  Place At(uint64_t offset) const {  // which is below bytes()
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
