// SPDX-License-Identifier: Apache-2.0
// TierSet: the tiers that a configuration asks for, with the threads that read and write the disk.
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
  // A tenant's number is its place in the list. `gpus`: as the configuration names them; all reach dram. `loop` must
  // outlive the set and need not run yet. Takes as long as allocating the disk's file and reading its records does, but
  // at most kOpenPatience. A disk that is full, read-only, failing or slower than that is no error: its tier is
  // degraded until Tick can open it.
  static constexpr std::chrono::seconds kOpenPatience{5};
  static absl::StatusOr<std::unique_ptr<TierSet>> Make(const v1::Config& config, EventLoop& loop,
                                                       std::span<const kernels::Gpu* const> gpus);

  ~TierSet();

  storage::Tiers tiers() const;
  // The tier of engines whose memory lies on no GPU that has one, and of other nodes, which are sent from a GPU's tier
  // what lies there alone (storage::Tiers::common).
  storage::MemoryTier& common() const { return hbm_.empty() || hbm_.front()->gpu() != nullptr ? *dram_ : *hbm_[0]; }
  // The level of engines whose memory lies on this GPU (Cache::SetLevel); none: it has no tier.
  std::optional<size_t> LevelOf(const kernels::Gpu& gpu) const;
  // The tiers of memory, by the numbers of their arenas (storage::kArenasApart). Engines map them.
  std::vector<storage::MemoryTier*> memory() const;
  std::vector<const storage::MemoryTier*> mapped() const;
  // Tells the cache its pools' floors, tenants' bounds, the times to live, and the objects found on the disk. Before
  // any session, and again where a configuration has changed: then there are no more objects found.
  void Configure(const v1::Config& config, storage::Cache& cache);
  // Tenants' budgets of the tiers, changed while the daemon runs. FAILED_PRECONDITION names the field that cannot.
  absl::Status CheckBudgets(const v1::Config& now, const v1::Config& next) const;
  void SetBudgets(const v1::Config& now, const v1::Config& next);

  const std::vector<std::unique_ptr<storage::MemoryTier>>& hbm() const { return hbm_; }
  const storage::MemoryTier& dram() const { return *dram_; }
  const storage::SsdTier* ssd() const { return ssd_.get(); }  // null: none
  // The threads of the disk, for its other files. Null: there is no ssd tier.
  storage::Executor* disk_io() const { return io_.get(); }
  size_t disk_queue() const { return io_ == nullptr ? 0 : io_->depth(); }
  uint64_t set_aside() const { return set_aside_; }  // damaged databases of records, since the start
  // Tries again, at intervals that grow from one second to five, to open a disk that could not be opened, on the disk's
  // threads, and gives the cache the objects found there. On the loop, about once a second.
  void Tick(storage::Cache& cache);
  // Has dram's next arenas made on a thread of their own, so that lookups and publishes need not wait for the kernel to
  // clear them: for each tenant that has used dram one arena's bytes ahead of its use, and as much as it has on the
  // disk. On the loop, after Configure.
  void PrepareArenas();
  // Begins nothing more on the disk, and waits until what it was asked for has returned, at most for `patience`. False:
  // something has not, so neither the set nor the cache may be destroyed. The log says which threads are stuck.
  bool StopDisk(std::chrono::nanoseconds patience);
  // Closes the disk's files, behind StopDisk, once the cache is called no more.
  void CloseDisk();

 private:
  TierSet() = default;
  absl::Status OpenDisk(const v1::Config& config, EventLoop& loop);
  bool StartOpening();  // false: the queue is full
  void Attach(absl::StatusOr<SsdDisk> opened, storage::Cache& cache);
  void PrepareArena(storage::TenantId tenant);

  std::vector<std::unique_ptr<storage::MemoryTier>> hbm_;  // in the configuration's order
  std::unique_ptr<storage::MemoryTier> dram_;
  std::unique_ptr<storage::BlockFile> file_;
  std::unique_ptr<storage::RecordStore> records_;
  size_t tenants_ = 0;
  uint64_t arena_bytes_ = 0;
  std::unique_ptr<WorkerPool> arenas_;
  EventLoop* loop_ = nullptr;  // as below, where there is an ssd tier
  std::unique_ptr<WorkerPool> io_;
  std::unique_ptr<storage::SsdTier> ssd_;
  std::vector<storage::SsdTier::Recovered> recovered_;
  uint64_t set_aside_ = 0;
  // While the tier has no disk.
  std::function<absl::StatusOr<SsdDisk>()> open_;
  std::future<absl::StatusOr<SsdDisk>> opened_;  // valid while an attempt is under way
  int ticks_left_ = 0, patience_ = 1;
};

}  // namespace ashlar::daemon
