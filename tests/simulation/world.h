// SPDX-License-Identifier: Apache-2.0
// World: the surroundings of a simulated cache (tiers, disk, clock and executors), which the simulation controls.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "storage/cache.h"
#include "storage/sharing/page_pools.h"
#include "storage/testing/rig.h"
#include "storage/testing/simulated_disk.h"
#include "storage/transfer/mover.h"
#include "tests/simulation/executor.h"
#include "tests/simulation/simulation.h"
#include "tests/simulation/texts.h"

namespace ashlar::simulation {

// A memory tier that sometimes has the planted bug. Without a bug it forwards calls and tracks allocations.
// Sometimes it lets callers wait for memory, and the system refuses it.
class FaultyTier final : public storage::Tier {
 public:
  // The tier must keep the budget. The memory behind it may be larger, for bugs that need it.
  FaultyTier(storage::MemoryTier& memory, Bug bug, std::mt19937_64& random, uint64_t seed, storage::Executor& system)
      : memory_(memory), bug_(bug), random_(random), growth_(seed), system_(system) {}

  TierKind kind() const override { return memory_.kind(); }
  absl::StatusOr<storage::Slot> Allocate(storage::TenantId tenant, uint64_t extents) override;
  bool WhenGrown(storage::TenantId tenant, uint64_t extents, std::function<void(bool)> call) override;
  void Free(storage::Slot slot) override;
  storage::TierUsage Usage(storage::TenantId tenant) const override;
  storage::TierUsage Usage() const override { return memory_.Usage(); }
  std::byte* Address(uint32_t arena, uint32_t extent) const override { return memory_.Address(arena, extent); }

  // Frees all allocations, as when the daemon dies: the next one uses the same memory, because creating it again costs
  // more than the rest of a crash.
  void Empty();

 private:
  using Extent = std::pair<uint32_t, uint32_t>;  // arena, number

  storage::MemoryTier& memory_;
  const Bug bug_;
  std::mt19937_64& random_;
  std::mt19937_64 growth_;
  storage::Executor& system_;
  std::optional<storage::Slot> last_;  // kSharesExtents: the slot that the next one may get as well
  std::map<Extent, int> shared_;
  std::map<Extent, storage::TenantId> lent_;
};

// The simulated disk's file. Under the bug it refuses the probes of a degraded tier.
class FaultyFile final : public storage::BlockFile {
 public:
  FaultyFile(storage::BlockFile& file, Bug bug) : file_(file), bug_(bug) {}

  uint64_t size() const override { return file_.size(); }
  absl::Status Read(uint64_t offset, std::span<std::byte> target) override { return file_.Read(offset, target); }
  absl::Status Write(uint64_t offset, std::span<const std::byte> source) override;
  absl::Status Sync() override { return file_.Sync(); }

 private:
  storage::BlockFile& file_;
  const Bug bug_;
};

struct Sizes {
  uint64_t hbm, dram, ssd;  // extents a tenant; no hbm tier when 0
  size_t threads;           // number of threads of either executor
  size_t in_flight;         // landings and compositions that a tenant may have in flight
  storage::Nanos ttl;       // how long objects of kExpiringTenant are kept unused; 0: until space is needed
};
inline constexpr storage::TenantId kExpiringTenant = 2;

class World {
 public:
  World(uint64_t seed, const Sizes& sizes, Bug bug);

  // Loses everything except the bytes that survive on the disk, and starts a new daemon on it.
  void CrashAndRestart();

  const Sizes sizes;
  const Bug bug;
  std::mt19937_64 random;
  storage::SimulatedDisk disk;
  FaultyFile probed_file;
  storage::ManualClock clock;
  SimulatedExecutor executor, io;
  storage::InlineWorkers workers;
  storage::CountingObserver observer;
  storage::CopyTransitionCounts copy_transitions{};  // sums over all runs of the daemon
  const std::unique_ptr<storage::MemoryTier> hbm, dram;
  const std::unique_ptr<FaultyTier> faulty_hbm, faulty_dram;
  std::unique_ptr<storage::SsdTier> ssd;
  std::optional<storage::Mover> mover;
  std::optional<storage::Cache> cache;
  std::optional<storage::PagePools> pools;

  const storage::MemoryTier& top() const { return hbm != nullptr ? *hbm : *dram; }
  uint64_t TopExtents() const { return hbm != nullptr ? sizes.hbm : sizes.dram; }
  uint64_t Draw(uint64_t below) { return random() % below; }

 private:
  void Start();
};

}  // namespace ashlar::simulation
