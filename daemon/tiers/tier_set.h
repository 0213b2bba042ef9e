// SPDX-License-Identifier: Apache-2.0
// TierSet: the configured tiers, and the threads that read and write the disk.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/worker_pool.h"
#include "daemon/tiers/ssd_disk.h"
#include "storage/cache.h"
#include "storage/tier/memory_tier.h"
#include "storage/tier/ssd_tier.h"
#include "storage/tier/tiers.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

class TierSet {
 public:
  // A tenant's number is its index in the list. `gpus` are the configured ones; all can access dram. `loop` must
  // outlive the set and need not run yet. Takes as long as allocating the disk's file and reading its records, but at
  // most kOpenPatience. A disk that is full, read-only, failing or slower is not an error: its tier is degraded until
  // Tick can open it.
  static constexpr std::chrono::seconds kOpenPatience{5};
  static absl::StatusOr<std::unique_ptr<TierSet>> Make(const v1::Config& config, EventLoop& loop,
                                                       std::span<const kernels::Gpu* const> gpus);

  ~TierSet();

  storage::Tiers tiers() const;
  // The tier for engines without a GPU tier, and for other nodes, which get objects that are only in a GPU's tier from
  // there (storage::Tiers::common).
  storage::MemoryTier& common() const { return hbm_.empty() || hbm_.front()->gpu() != nullptr ? *dram_ : *hbm_[0]; }
  // Returns the level (Cache::SetLevel) of engines whose memory is on this GPU; nothing if the GPU has no tier.
  std::optional<size_t> LevelOf(const kernels::Gpu& gpu) const;
  // The memory tiers, indexed by the numbers of their arenas (storage::kArenasApart). Engines map them.
  std::vector<storage::MemoryTier*> memory() const;
  std::vector<const storage::MemoryTier*> mapped() const;
  // Configures the cache: floors of pools, limits of tenants, times to live, and the objects found on the disk. Call
  // before any session, and again after a configuration change; then without objects.
  void Configure(const v1::Config& config, storage::Cache& cache);
  // Checks changed tenant budgets while the daemon runs. FAILED_PRECONDITION names the field that cannot change.
  absl::Status CheckBudgets(const v1::Config& now, const v1::Config& next) const;
  void SetBudgets(const v1::Config& now, const v1::Config& next);

  const std::vector<std::unique_ptr<storage::MemoryTier>>& hbm() const { return hbm_; }
  const storage::MemoryTier& dram() const { return *dram_; }
  const storage::SsdTier* ssd() const { return ssd_.get(); }  // null without an ssd tier
  // The disk's threads, for its other files. Null without an ssd tier.
  storage::Executor* disk_io() const { return io_.get(); }
  size_t disk_queue() const { return io_ == nullptr ? 0 : io_->depth(); }
  uint64_t quarantined() const { return quarantined_; }  // damaged record databases that were renamed, since the start
  // Retries opening the disk, at intervals that grow from one to five seconds, on the disk's threads, and gives the
  // objects found there to the cache. Runs on the loop, about once per second.
  void Tick(storage::Cache& cache);
  // Prepares dram's next arenas on a separate thread, so that the loop does not wait for the kernel to clear them: for
  // each tenant that has used dram, one arena ahead of its use plus as much as it has on the disk. Allocations do the
  // first part themselves (MemoryTier::CreateOn). Runs on the loop, after Configure.
  void PrepareArenas();
  // Waits for arenas that are being created. Starts no further disk operation, and waits at most `patience` for those
  // in flight. Returns false, after logging the stuck threads, if some have not returned; then neither the set nor the
  // cache may be destroyed.
  bool StopDisk(std::chrono::nanoseconds patience);
  // Closes the disk's files. Call after StopDisk, when the cache is no longer used.
  void CloseDisk();

 private:
  TierSet() = default;
  absl::Status OpenDisk(const v1::Config& config, EventLoop& loop);
  bool StartOpening();  // returns false if the queue is full
  void Attach(absl::StatusOr<SsdDisk> opened, storage::Cache& cache);
  void PrepareArena(storage::TenantId tenant);
  bool CreateArena(storage::TenantId tenant, const std::shared_ptr<storage::ComingArena>& arena);

  std::vector<std::unique_ptr<storage::MemoryTier>> hbm_;  // ordered as in the configuration
  std::unique_ptr<storage::MemoryTier> dram_;
  std::unique_ptr<storage::BlockFile> file_;
  std::unique_ptr<storage::RecordStore> records_;
  size_t tenants_ = 0;
  uint64_t arena_bytes_ = 0;
  std::unique_ptr<WorkerPool> arenas_;
  size_t creating_ = 0;        // arenas in the pool
  size_t next_ = 0;            // tenant whose arena is prepared next, modulo tenants_
  EventLoop* loop_ = nullptr;  // set if there is an ssd tier, like the members below
  std::unique_ptr<WorkerPool> io_;
  std::unique_ptr<storage::SsdTier> ssd_;
  std::vector<storage::SsdTier::Recovered> recovered_;
  uint64_t quarantined_ = 0;
  // Set while the tier has no disk.
  std::function<absl::StatusOr<SsdDisk>()> open_;
  std::future<absl::StatusOr<SsdDisk>> opened_;  // valid during an attempt
  int ticks_left_ = 0, patience_ = 1;
};

}  // namespace ashlar::daemon
