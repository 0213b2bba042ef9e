// SPDX-License-Identifier: Apache-2.0
// SsdTier: objects in the extents of one slab file, and a record for each that gives its place. Acknowledged objects
// survive kill -9 and power loss, as far as the disk tells the truth (docs/formats.md has every byte).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
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
#include "storage/tier/ssd_format.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

struct SsdTierOptions {
  SlabId new_id{};              // random; becomes the name of a slab that is new
  size_t pieces_in_flight = 8;  // of one read or write, each up to 1 MiB
};

// Owned by the metadata thread, on which every `done` is called, never before the call that it belongs to has returned.
// All input and output after Recover is on the executor, which nobody else may use. Destroy only once that is idle.
class SsdTier final : public Tier {
 public:
  TierKind kind() const override { return TierKind::kSsd; }
  std::byte* Address(uint32_t, uint32_t) const override { return nullptr; }

  // Bytes of a slab file that holds objects of `capacity_bytes`, which count in whole extents, rounded down.
  static uint64_t SlabBytes(uint64_t capacity_bytes);

  // Reads the records, on the calling thread. FAILED_PRECONDITION where the slab or its records are of a format version
  // that this build does not know, or do not belong together; DATA_LOSS where manifest or slab's header are damaged, or
  // the slab is empty and there are records.
  static absl::StatusOr<std::unique_ptr<SsdTier>> Open(const SsdTierOptions& options, BlockFile& file,
                                                       RecordStore& records, Executor& io);
  // A tier whose disk cannot be opened, for `why`: degraded, and empty until Attach. Tenants are added as to any other.
  static absl::StatusOr<std::unique_ptr<SsdTier>> WithoutDisk(const SsdTierOptions& options, uint64_t capacity_bytes,
                                                              Executor& io, absl::Status why);
  // Gives a tier without a disk the disk of `opened`, a tier that was opened since with the same capacity and tenants:
  // only Recover was called on it.
  void Attach(std::unique_ptr<SsdTier> opened);
  // Its disk still cannot be opened, for `why`.
  void StillWithoutDisk(absl::Status why) { health_ = std::move(why); }
  bool has_disk() const { return file_ != nullptr; }

  // Gives a tenant a budget, once, before Recover. It counts in whole extents, rounded down. INVALID_ARGUMENT naming
  // the field when it holds no extent, the name is empty or given away, or the budgets together exceed the capacity;
  // ALREADY_EXISTS for a tenant that has one. Records name tenants by name: numbers may change between runs.
  absl::Status AddTenant(TenantId tenant, std::string name, uint64_t budget_bytes);

  // Gives a tenant another budget; the sum over tenants must fit the capacity. Check: FAILED_PRECONDITION where its
  // objects take more, or there is no disk; INVALID_ARGUMENT below one extent; NOT_FOUND for one that has none.
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
    uint64_t bytes = 0;        // of their extents
    uint64_t damaged = 0;      // records that do not decode, or name what the slab does not have: deleted
    uint64_t superseded = 0;   // records of a key, or in extents, that a later record has: deleted
    uint64_t over_budget = 0;  // objects that a tenant's budget no longer holds, oldest first: deleted
    std::map<std::string, uint64_t> unknown_tenants;  // bytes of tenants that were not added: kept out, and kept
  };
  // Returns the acknowledged objects, oldest first. Call it once, after the tenants were added and before anything
  // else. It does not read the objects' bytes; a landing checks their checksums. Deletions are durable when it returns;
  // their error is its error.
  absl::StatusOr<std::vector<Recovered>> Recover();
  const RecoveryReport& recovery() const { return report_; }

  // RESOURCE_EXHAUSTED when the tenant's budget has no `extents` free extents: the caller erases and tries again, once
  // that is durable.
  absl::StatusOr<Slot> Allocate(TenantId tenant, uint64_t extents) override;
  // Gives back a slot that is not committed: its commit was never asked for, or failed. Nothing of it may be under way.
  void Free(Slot slot) override;
  TierUsage Usage(TenantId tenant) const override;  // all zero for an unknown tenant
  TierUsage Usage() const override;

  // Writes extents [first, first + sources.size()) of a slot that is not committed, from memory aligned to pages that
  // stays as it is until `done`, in pieces of up to 1 MiB spread over the executor. False: its queue is full, nothing
  // is called. After an error the slot can only be given back.
  bool Write(const Slot& slot, uint64_t first, std::vector<const std::byte*> sources,
             std::function<void(absl::Status)> done);

  // Makes the object durable: all data written so far is synced, then its record is written; many commits share one
  // sync. done(OK) = acknowledged. Every extent of the slot must have been written (FAILED_PRECONDITION: what lies
  // there could be another tenant's), without error and without a sync having failed since the first write (ABORTED).
  // After any error the slot is to be given back; until that is durable the object may still come back after a crash,
  // whole.
  void Commit(TenantId tenant, PoolKind pool, const ObjectHeader& header, const Slot& slot,
              std::function<void(absl::Status)> done);

  // Reads extents [first, first + targets.size()) of a slot into memory aligned to pages. As Write. After an error the
  // targets may hold anything.
  bool Read(const Slot& slot, uint64_t first, std::vector<std::byte*> targets, std::function<void(absl::Status)> done);

  // OK, or why the tier is degraded: the first write, sync or batch of records that failed since it was well, or what
  // the latest attempt to write again has found, or that the disk is stalled. A degraded tier reads as ever, and keeps
  // what it has. It takes no writes by the cache's own choice (storage/objects/placement.h); deletions wait.
  const absl::Status& health() const { return health_; }
  bool degraded() const { return !health_.ok(); }
  // An operation of the disk has taken longer than kDeadline. It cannot be cancelled: its memory and its extents stay
  // taken until it returns. Meanwhile nobody should wait for the disk. As of the latest Tick.
  bool stalled() const { return stalled_; }
  static constexpr Nanos kDeadline = 3'000'000'000;
  // Call it about once a second. Tries again what the disk has refused, at intervals that grow from one second to five.
  void Tick(Nanos now);
  // Tries it now: a block that means nothing is written and synced, then a batch of records. `done` once it is known
  // what came of that. False, and `done` is not called: the tier is well, has no disk, or is being tried.
  bool Probe(std::function<void()> done);
  bool probing() const { return probing_; }

  // Erases a committed object, of which nothing is under way. Its extents can be allocated again, and `done` is
  // called, once the deletion of its record is durable; until then it may come back after a crash: whole, or with
  // checksums that fail where its bytes were to be overwritten. A deletion that fails is tried again with the next
  // commit, erasure, or allocation that finds no room.
  void Erase(TenantId tenant, const Key& key, Slot slot, std::function<void()> done = nullptr);

  // The bytes of this slot are overwritten with zeros when it is given back or erased, durably, before its record is
  // deleted. Where that fails, the slot stays the tenant's, and is tried again by the tenant's next WhenErased, and
  // once a degraded tier is well. The first failure of a slot makes the tier degraded, later ones do not: it may be one
  // bad place of a disk that is well.
  void Shred(const Slot& slot) { to_shred_.insert(slot.runs.front().first); }
  struct Erased {
    uint64_t objects = 0, bytes = 0;
  };
  // Erases and overwrites what the disk has of the tenant of this name, if it was not added (RecoveryReport), or of one
  // of its namespaces. From now on that is of tenant `as`, which has no budget.
  Erased EraseUnknown(const std::string& name, const std::optional<NamespaceId>& ns, TenantId as);
  // `done` once all deletions and overwriting of the tenant's that were asked for before are durable; an error: some
  // bytes are not overwritten, and their records not deleted. While the tier is degraded it comes late, and without a
  // disk at once, UNAVAILABLE.
  void WhenErased(TenantId tenant, std::function<void(absl::Status)> done);

 private:
  struct Tenant {
    std::string name;
    uint64_t budget_bytes = 0;
    uint64_t used_bytes = 0;
  };
  // The state of a slot that is allocated and not committed.
  struct Uncommitted {
    std::vector<bool> written;  // by extent
    uint64_t failed_syncs = 0;  // when its first write began
    size_t writes_in_flight = 0;
    bool begun = false;
    bool committing = false;
    bool failed = false;   // a write of it
    std::string doubtful;  // the name of a record of it that may be durable
  };
  // A slot that is given back, and the name of its record; empty: it has none.
  struct Leaving {
    Slot slot;
    std::string record;
    std::function<void()> done;
    absl::Status refused = {};  // the latest failure to overwrite it
    uint64_t overwritten = 0;   // extents
    uint64_t failed_syncs = 0;  // when overwriting began
  };
  // Of a tenant that was not added.
  struct Unknown {
    NamespaceId ns;
    std::vector<ExtentRun> runs;
    std::string record;
    uint64_t bytes = 0;
  };
  struct WhenShredded {
    TenantId tenant;
    std::function<void(absl::Status)> done;
  };
  enum class Claim { kGranted, kDamaged, kSuperseded, kOverBudget };

  SsdTier(const SsdTierOptions& options, uint64_t extents, Executor& io);
  void Failed(const absl::Status& status);
  void CheckStall(Nanos since_last_tick);
  void Probed(const absl::Status& status);
  absl::Status CheckFormat(const SlabId& new_id);
  absl::Status LoadRecords();
  Claim ClaimExtents(const SsdRecord& record, Tenant* tenant);
  absl::Status CheckCommit(const ObjectHeader& header, const Slot& slot) const;
  void Leave(Leaving leaving);
  void Left(const Leaving& leaving);
  void ShredNext();
  void Shredded(const absl::Status& status);
  void EndShred(Leaving leaving);
  void NotShredded(Leaving leaving, const absl::Status& why);
  void ShredAgain(std::optional<TenantId> tenant);
  absl::Status Unshredded(TenantId tenant) const;

  const uint64_t slab_extents_;
  const Executor& io_;
  BlockFile* file_ = nullptr;  // null: the tier has no disk
  RecordStore* records_ = nullptr;
  DiskQueue disk_;
  CommitQueue commits_;
  ExtentAllocator extents_;
  std::map<TenantId, Tenant> tenants_;
  uint64_t budgets_bytes_ = 0;
  // Slots by their first extent, which no two of them share. Looked up, never iterated.
  absl::flat_hash_map<uint32_t, Uncommitted> uncommitted_;
  absl::flat_hash_map<uint32_t, uint64_t> committed_;  // → the record's sequence
  uint64_t next_sequence_ = 1;
  absl::flat_hash_set<uint32_t> to_shred_;  // slots, by their first extent
  std::deque<Leaving> shredding_;
  bool shreds_ = false;              // the first of these
  size_t shreds_ending_ = 0;         // overwritten; sync and deletion are under way
  std::vector<Leaving> unshredded_;  // that failed
  std::vector<WhenShredded> when_shredded_;
  std::map<std::string, std::vector<Unknown>> unknown_;  // by tenant
  absl::Status health_;
  bool stalled_ = false;
  bool stood_still_ = false;  // before the latest Tick: this process, it seems, not the disk
  bool probing_ = false;
  Nanos now_ = 0, next_probe_ = 0, well_since_ = 0, patience_;
  // Between Open and Recover.
  std::optional<SlabId> manifest_;
  std::vector<SsdRecord> loaded_;
  std::vector<RecordStore::Change> deletions_;
  RecoveryReport report_;
};

}  // namespace ashlar::storage
