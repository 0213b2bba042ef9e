// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/commit_queue.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

namespace ashlar::storage {
namespace {

// Deletions per batch: all of them are reported in one turn of the metadata thread.
constexpr size_t kMostDeletions = 1024;

template <typename T>
void Append(std::vector<T>& target, std::vector<T> source) {
  target.insert(target.end(), std::make_move_iterator(source.begin()), std::make_move_iterator(source.end()));
}

}  // namespace

void CommitQueue::Put(std::string name, std::optional<std::string> value, uint64_t failed_syncs,
                      std::function<void(Outcome)> done) {
  unsynced_.push_back({std::move(name), std::move(value), failed_syncs, std::move(done)});
  StartSync();
}

void CommitQueue::Delete(std::string name, std::function<void()> done) {
  deletes_.push_back({std::move(name), std::move(done)});
  if (!held_) StartBatch();
}

void CommitQueue::HoldDeletions(bool hold) {
  held_ = hold;
  if (!held_) Retry();
}

void CommitQueue::Retry() {
  if (!deletes_.empty() && !writing_) StartBatch();
}

void CommitQueue::StartSync() {
  if (syncing_ || unsynced_.empty()) return;
  auto sync = std::make_shared<Sync>();
  for (PendingPut& put : std::exchange(unsynced_, {})) {
    (put.failed_syncs == failed_syncs_ ? sync->puts : sync->abandoned).push_back(std::move(put));
  }
  syncing_ = true;
  disk_.RunNext(
      [this, sync](size_t) {
        if (!sync->puts.empty()) sync->status = file_->Sync();
        return absl::OkStatus();
      },
      [this, sync](const absl::Status&) { Synced(*sync); });
}

void CommitQueue::Synced(Sync& sync) {
  syncing_ = false;
  if (sync.status.ok()) {
    Append(synced_, std::exchange(sync.puts, {}));
  } else {
    ++failed_syncs_;
    failed_(sync.status);
  }
  if (!synced_.empty()) StartBatch();
  StartSync();
  for (const PendingPut& put : sync.puts) put.done({sync.status});
  for (const PendingPut& put : sync.abandoned) {
    put.done({absl::AbortedError("sync failed after the data was written")});
  }
}

void CommitQueue::StartBatch() {
  wanted_ = writing_;
  if (writing_) return;
  auto batch = std::make_shared<Batch>();
  batch->puts = std::exchange(synced_, {});
  const auto taken = deletes_.begin() + static_cast<ptrdiff_t>(std::min(deletes_.size(), kMostDeletions));
  batch->deletes.assign(std::make_move_iterator(deletes_.begin()), std::make_move_iterator(taken));
  deletes_.erase(deletes_.begin(), taken);
  wanted_ = !deletes_.empty();
  writing_ = true;
  disk_.RunNext(
      [this, batch](size_t) {
        std::vector<RecordStore::Change> changes;
        for (const PendingDelete& pending : batch->deletes) changes.push_back({pending.name, std::nullopt});
        for (PendingPut& put : batch->puts) changes.push_back({put.name, std::move(put.value)});
        batch->status = records_->Write(changes);
        return absl::OkStatus();
      },
      [this, batch](const absl::Status&) { Written(*batch); });
}

void CommitQueue::Written(Batch& batch) {
  writing_ = false;
  if (!batch.status.ok()) {
    deletes_.insert(deletes_.begin(), std::make_move_iterator(batch.deletes.begin()),
                    std::make_move_iterator(batch.deletes.end()));
    batch.deletes.clear();
    failed_(batch.status);
  }
  if (wanted_ && (!held_ || !synced_.empty())) StartBatch();
  for (const PendingDelete& pending : batch.deletes) pending.done();
  for (const PendingPut& put : batch.puts) put.done({batch.status, !batch.status.ok()});
}

}  // namespace ashlar::storage
