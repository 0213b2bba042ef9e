// SPDX-License-Identifier: Apache-2.0
// SsdTier: stores objects in the extents of one slab file, with a record per object for its place. Acknowledged objects
// survive kill -9 and power loss, if the disk honours syncs (docs/formats.md has every byte).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/object.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/tier/block_file.h"
#include "storage/tier/commit_queue.h"
#include "storage/tier/disk_queue.h"
#include "storage/tier/extent_allocator.h"
#include "storage/tier/record_store.h"
#include "storage/tier/ssd_eraser.h"
#include "storage/tier/ssd_format.h"
#include "storage/tier/ssd_health.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

struct SsdTierOptions {
  SlabId new_id{};              // random; becomes the id of a new slab
  size_t pieces_in_flight = 8;  // per read or write, each up to 1 MiB
};

// Owned by the metadata thread. Every `done` is called there, never before its call has returned. All I/O after Recover
// runs on the executor, which nothing else may use. Destroy the tier only when the executor is idle.
class SsdTier final : public Tier {
 public:
  TierKind kind() const override { return TierKind::kSsd; }
  std::byte* Address(uint32_t, uint32_t) const override { return nullptr; }

  // Size of a slab file for `capacity_bytes`, rounded down to whole extents.
  static uint64_t SlabBytes(uint64_t capacity_bytes);

  // Reads the records on the calling thread. FAILED_PRECONDITION if slab and records have an unknown format version, or
  // do not belong together. DATA_LOSS if the manifest or the slab's header are damaged, or the slab is empty but there
  // are records.
  static absl::StatusOr<std::unique_ptr<SsdTier>> Open(const SsdTierOptions& options, BlockFile& file,
                                                       RecordStore& records, Executor& io);
  // Creates a tier whose disk cannot be opened, because of `why`: degraded, and empty until Attach. Tenants are added
  // as usual.
  static absl::StatusOr<std::unique_ptr<SsdTier>> WithoutDisk(const SsdTierOptions& options, uint64_t capacity_bytes,
                                                              Executor& io, absl::Status why);
  // Gives a tier without a disk the disk of `opened`, a tier opened with the same capacity and tenants on which only
  // Recover was called.
  void Attach(std::unique_ptr<SsdTier> opened);
  // The disk still cannot be opened, because of `why`.
  void StillWithoutDisk(absl::Status why) { health_.NotOpened(std::move(why)); }
  bool has_disk() const { return file_ != nullptr; }

  // Sets a tenant's budget, once, before Recover, rounded down to whole extents. INVALID_ARGUMENT names the field if it
  // holds no extent, the name is empty or in use, or the budgets exceed the capacity; ALREADY_EXISTS for a tenant with
  // a budget. Records identify tenants by name, because numbers may change between runs.
  absl::Status AddTenant(TenantId tenant, std::string name, uint64_t budget_bytes);

  // Changes a tenant's budget; the sum over tenants must not exceed the capacity. Check: FAILED_PRECONDITION if its
  // objects take more, or there is no disk; INVALID_ARGUMENT below one extent; NOT_FOUND without a budget.
  absl::Status CheckBudget(TenantId tenant, uint64_t budget_bytes) const;
  void SetBudget(TenantId tenant, uint64_t budget_bytes);

  struct Recovered {
    TenantId tenant = 0;
    PoolKind pool = PoolKind::kPublic;
    ObjectHeader header;
    Slot slot;
  };
  struct RecoveryReport {
    uint64_t objects = 0;
    uint64_t bytes = 0;                               // bytes of their extents
    uint64_t damaged = 0;                             // deleted records that do not decode or refer outside the slab
    uint64_t superseded = 0;                          // deleted records whose key or extents a later record has
    uint64_t over_budget = 0;                         // deleted objects that exceeded a tenant's budget, oldest first
    std::map<std::string, uint64_t> unknown_tenants;  // bytes of tenants that were not added; not loaded, and kept
  };
  // Returns the acknowledged objects, oldest first. Call once, after adding tenants and before anything else. Does not
  // read the objects' bytes; landings verify their checksums. Deletions are durable when it returns; it returns their
  // error.
  absl::StatusOr<std::vector<Recovered>> Recover();
  const RecoveryReport& recovery() const { return report_; }

  // RESOURCE_EXHAUSTED if the tenant's budget has no `extents` free extents: the caller must erase, wait until that is
  // durable, and retry.
  absl::StatusOr<Slot> Allocate(TenantId tenant, uint64_t extents) override;
  // Frees a slot that is not committed: Commit was not called, or failed. Nothing of it may be in flight.
  void Free(Slot slot) override;
  TierUsage Usage(TenantId tenant) const override;  // all zero for an unknown tenant
  TierUsage Usage() const override;

  // Writes extents [first, first + sources.size()) of an uncommitted slot, from page-aligned memory that must not
  // change until `done`, in pieces of up to 1 MiB on the executor. Returns false, calling nothing, if its queue is
  // full. After an error the slot can only be freed.
  bool Write(const Slot& slot, uint64_t first, std::vector<const std::byte*> sources,
             std::function<void(absl::Status)> done);

  // Makes the object durable: syncs all data written so far, then writes the record; many commits share one sync.
  // done(OK) acknowledges it. Every extent of the slot must have been written (FAILED_PRECONDITION otherwise, because
  // it could hold another tenant's data), without error and without a failed sync since the first write (ABORTED).
  // After an error the slot must be freed; until that is durable, the object may reappear after a crash, complete.
  void Commit(TenantId tenant, PoolKind pool, const ObjectHeader& header, const Slot& slot,
              std::function<void(absl::Status)> done);

  // Reads extents [first, first + targets.size()) of a slot into page-aligned memory, like Write. After an error the
  // targets may hold anything.
  bool Read(const Slot& slot, uint64_t first, std::vector<std::byte*> targets, std::function<void(absl::Status)> done);

  SsdHealth& health() { return health_; }
  const SsdHealth& health() const { return health_; }

  // Erases a committed object with nothing in flight. When the deletion of its record is durable, its extents can be
  // allocated and `done` is called. Until then it may reappear after a crash, complete or, if its bytes were being
  // overwritten, with wrong checksums. A failed deletion is retried with the next commit, erasure, or allocation
  // without space.
  void Erase(TenantId tenant, const Key& key, Slot slot, std::function<void()> done = nullptr);

  // Overwrites the bytes of this slot durably with zeros when it is freed or erased, before its record is deleted. If
  // that fails, the slot stays with the tenant, and is retried by the tenant's next WhenErased and when a degraded tier
  // recovers. Only the first failure of a slot degrades the tier, because a single bad block does not mean a failing
  // disk.
  void Shred(const Slot& slot) { eraser_.MarkForOverwrite(slot); }
  struct Erased {
    uint64_t objects = 0, bytes = 0;
  };
  // Erases and overwrites what the disk has of the tenant with this name, if it was not added (RecoveryReport), or of
  // one of its namespaces. It is attributed to tenant `as`, which has no budget.
  Erased EraseUnknown(const std::string& name, const std::optional<NamespaceId>& ns, TenantId as);
  // Calls `done` when all earlier deletions and overwrites of the tenant are durable. An error means that some bytes
  // are not overwritten, and their records not deleted. It is delayed while the tier is degraded; without a disk it is
  // UNAVAILABLE immediately.
  void WhenErased(TenantId tenant, std::function<void(absl::Status)> done);

 private:
  struct Tenant {
    std::string name;
    uint64_t budget_bytes = 0;
    uint64_t used_bytes = 0;
  };
  // The state of an allocated, uncommitted slot.
  struct Uncommitted {
    std::vector<bool> written;  // indexed by extent
    uint64_t failed_syncs = 0;  // at the start of its first write
    size_t writes_in_flight = 0;
    bool begun = false;
    bool committing = false;
    bool failed = false;     // a write of it failed
    std::string unresolved;  // name of a record of it that may be durable
  };
  // An object of a tenant that was not added.
  struct Unknown {
    NamespaceId ns;
    std::vector<ExtentRun> runs;
    std::string record;
    uint64_t bytes = 0;
  };
  enum class Claim { kGranted, kDamaged, kSuperseded, kOverBudget };

  SsdTier(const SsdTierOptions& options, uint64_t extents, Executor& io);
  void UseDisk(BlockFile& file, RecordStore& records);
  Claim ClaimExtents(const SsdRecord& record, Tenant* tenant);
  absl::Status CheckCommit(const ObjectHeader& header, const Slot& slot) const;
  void Release(const Slot& slot);

  const uint64_t slab_extents_;
  BlockFile* file_ = nullptr;  // null without a disk
  RecordStore* records_ = nullptr;
  DiskQueue disk_;
  CommitQueue commits_;
  SsdHealth health_;
  SsdEraser eraser_;
  ExtentAllocator extents_;
  std::map<TenantId, Tenant> tenants_;
  uint64_t budgets_bytes_ = 0;
  // Keyed by the first extent of the slot, which is unique. Looked up, never iterated.
  absl::flat_hash_map<uint32_t, Uncommitted> uncommitted_;
  absl::flat_hash_map<uint32_t, uint64_t> committed_;  // value: sequence of the record
  uint64_t next_sequence_ = 1;
  std::map<std::string, std::vector<Unknown>> unknown_;  // keyed by tenant
  // Between Open and Recover.
  std::vector<SsdRecord> loaded_;
  std::vector<RecordStore::Change> deletions_;
  RecoveryReport report_;
};

}  // namespace ashlar::storage
