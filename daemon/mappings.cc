// SPDX-License-Identifier: Apache-2.0
#include "daemon/mappings.h"

#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/peer/channels/peer_bounds.h"
#include "daemon/threads.h"

namespace ashlar::daemon {
namespace {

// Code and data of the program and its libraries (480 with all tiers, after startup), the allocator's heaps beyond the
// first one of each arena, mappings of RocksDB, gRPC and the GPU driver; and the same again in reserve.
constexpr uint64_t kOwnMappings = 4096;
// Large blocks that the allocator maps individually; further ones come from its heaps.
constexpr uint64_t kLargeBlocks = 4096;
constexpr uint64_t kPerThread = 2;         // its stack and guard page
constexpr uint64_t kHeapsOfACore = 8 * 2;  // the allocator's arenas, each with a used and an unused part

uint64_t Arenas(uint64_t budget, uint64_t arena_bytes) {
  return budget == 0 ? 0 : (budget + arena_bytes - 1) / arena_bytes;
}

}  // namespace

uint64_t MappingsNeeded(const v1::Config& config) {
  const uint64_t cores = std::max(1u, std::thread::hardware_concurrency());
  uint64_t needed = kOwnMappings + kLargeBlocks + kPerThread * ThreadsNeeded(config) + kHeapsOfACore * cores +
                    PeerBounds::Of(config).mappings;
  for (const v1::Tenant& tenant : config.tenants()) {
    needed += tenant.max_regions() + Arenas(tenant.dram_bytes(), config.dram().arena_bytes());
    for (const v1::Hbm& hbm : config.hbm()) needed += Arenas(tenant.hbm_bytes(), hbm.arena_bytes());
  }
  return needed;
}

absl::Status CheckMappings(const v1::Config& config, const std::string& root) {
  uint64_t limit = 0;
  if (!(std::ifstream(root + "/proc/sys/vm/max_map_count") >> limit)) return absl::OkStatus();
  const uint64_t needed = MappingsNeeded(config);
  if (needed <= limit) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "mappings: the configuration may need ", needed, ", the limit of this machine (vm.max_map_count) is ", limit,
      "; raise the limit with sysctl, increase dram.arena_bytes, or lower tenants[].max_regions"));
}

// Limits the mapped blocks. This turns off glibc's dynamic threshold for mapping a block. With 4 MiB, requests use
// heaps that stay and cause no page faults; a larger block is returned immediately.
void BoundAllocatorMappings() {
  constexpr int kLarge = 4 << 20;
  mallopt(M_MMAP_MAX, static_cast<int>(kLargeBlocks));
  mallopt(M_MMAP_THRESHOLD, kLarge);
  mallopt(M_TRIM_THRESHOLD, 2 * kLarge);
}

}  // namespace ashlar::daemon
