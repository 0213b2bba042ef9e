// SPDX-License-Identifier: Apache-2.0
// CommitQueue: group commit. Data becomes durable before the records that refer to it. One sync and one batch serve
// many records.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "storage/tier/block_file.h"
#include "storage/tier/disk_queue.h"
#include "storage/tier/record_store.h"

namespace ashlar::storage {

// Owned by the metadata thread. At most one sync and one batch are in flight, concurrently; later commits share the
// next ones.
class CommitQueue {
 public:
  struct Outcome {
    absl::Status status;
    bool unresolved = false;  // not acknowledged, but the record may exist after a crash; delete it
  };

  // `failed` is called for every failed sync and batch, before the affected commits.
  CommitQueue(DiskQueue& disk, std::function<void(const absl::Status&)> failed)
      : disk_(disk), failed_(std::move(failed)) {}
  CommitQueue(const CommitQueue&) = delete;
  CommitQueue& operator=(const CommitQueue&) = delete;

  // Sets the file to sync and the records to write. Call once, first; both must outlive the queue.
  void Use(BlockFile& file, RecordStore& records) {
    file_ = &file;
    records_ = &records;
  }

  // Returns the number of failed syncs. The writes that they covered stay unresolved: a later successful sync says
  // nothing about them.
  uint64_t failed_syncs() const { return failed_syncs_; }

  // Syncs the file, then writes the record, or without a value deletes it. ABORTED if a sync has failed since
  // `failed_syncs`, the count before the caller wrote the record's data.
  void Put(std::string name, std::optional<std::string> value, uint64_t failed_syncs,
           std::function<void(Outcome)> done);

  // Calls `done` when the deletion is durable. A failed deletion is retried with the next batch.
  void Delete(std::string name, std::function<void()> done);
  // While held, deletions alone do not start a batch, which would fail on a disk that is known to fail.
  void HoldDeletions(bool hold);
  // Retries failed deletions.
  void Retry();

 private:
  struct PendingPut {
    std::string name;
    std::optional<std::string> value;
    uint64_t failed_syncs;
    std::function<void(Outcome)> done;
  };
  struct PendingDelete {
    std::string name;
    std::function<void()> done;
  };
  struct Sync {
    std::vector<PendingPut> puts, abandoned;
    absl::Status status;
  };
  struct Batch {
    std::vector<PendingPut> puts;
    std::vector<PendingDelete> deletes;
    absl::Status status;
  };

  void StartSync();
  void Synced(Sync& sync);
  void StartBatch();
  void Written(Batch& batch);

  BlockFile* file_ = nullptr;
  RecordStore* records_ = nullptr;
  DiskQueue& disk_;
  const std::function<void(const absl::Status&)> failed_;
  uint64_t failed_syncs_ = 0;
  bool syncing_ = false, writing_ = false;
  bool held_ = false;
  bool wanted_ = false;  // something was queued while a batch was being written
  std::vector<PendingPut> unsynced_, synced_;
  std::deque<PendingDelete> deletes_;
};

}  // namespace ashlar::storage
