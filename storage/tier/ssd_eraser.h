// SPDX-License-Identifier: Apache-2.0
// SsdEraser: removes slots from an SsdTier: their records and, if requested, their bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "storage/ids.h"
#include "storage/tier/block_file.h"
#include "storage/tier/commit_queue.h"
#include "storage/tier/disk_queue.h"
#include "storage/tier/ssd_health.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// Owned by the metadata thread. Overwrites one slot at a time.
class SsdEraser {
 public:
  // `free` gets each slot whose record is durably deleted and whose bytes, if requested, are overwritten.
  SsdEraser(DiskQueue& disk, CommitQueue& commits, SsdHealth& health, std::function<void(const Slot&)> free)
      : disk_(disk), commits_(commits), health_(health), free_(std::move(free)) {}
  SsdEraser(const SsdEraser&) = delete;
  SsdEraser& operator=(const SsdEraser&) = delete;

  // Sets the slab file. Call once, first.
  void Use(BlockFile& file) { file_ = &file; }

  // Requests that the slot is overwritten when it is erased.
  void MarkForOverwrite(const Slot& slot) { marked_.insert(slot.runs.front().first); }
  // Erases a slot and its record; an empty name means that it has none. Calls `done`, which may be null, when the slot
  // is free.
  void Erase(Slot slot, std::string record, std::function<void()> done);
  // Erases like Erase, and overwrites the slot.
  void Overwrite(Slot slot, std::string record);
  // Retries all failed overwrites.
  void Retry() { RetryOf(std::nullopt); }
  // Calls `done` when all earlier deletions and overwrites of the tenant are durable, after retrying failed ones. An
  // error is that of a slot that could not be overwritten.
  void WhenErased(TenantId tenant, std::function<void(absl::Status)> done);

 private:
  struct Erasure {
    Slot slot;
    std::string record;  // empty without one
    std::function<void()> done;
    absl::Status failure = {};  // the latest failure to overwrite it
    uint64_t overwritten = 0;   // extents
    uint64_t failed_syncs = 0;  // at the start of overwriting
  };
  struct Waiter {
    TenantId tenant;
    std::function<void(absl::Status)> done;
  };

  void Finish(const Erasure& erasure);
  void OverwriteNext();
  void PieceOverwritten(const absl::Status& status);
  void DeleteRecord(Erasure erasure);
  void NotOverwritten(Erasure erasure, const absl::Status& why);
  void RetryOf(std::optional<TenantId> tenant);
  absl::Status FailureOf(TenantId tenant) const;

  DiskQueue& disk_;
  CommitQueue& commits_;
  SsdHealth& health_;
  const std::function<void(const Slot&)> free_;
  BlockFile* file_ = nullptr;
  absl::flat_hash_set<uint32_t> marked_;  // slots by their first extent
  std::deque<Erasure> queue_;             // erasures that are not overwritten yet
  bool overwriting_ = false;              // a piece of the first one is in flight
  size_t deleting_ = 0;                   // overwritten; sync and deletion are in flight
  std::vector<Erasure> failed_;
  std::vector<Waiter> waiters_;
};

}  // namespace ashlar::storage
