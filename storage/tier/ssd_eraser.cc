// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/ssd_eraser.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "proto/limits.h"

namespace ashlar::storage {
namespace {

constexpr std::string_view kNoRecord =
    "erased";  // name of a record that never exists: its deletion completes after all earlier ones

alignas(BlockFile::kBlockBytes) constexpr std::array<std::byte, limits::kExtentBytes> kZeroExtent{};

constexpr uint64_t kOverwriteExtents = 4;  // overwritten at a time, because the disk's deadline applies to one piece

// Overwrites a piece of the slot, starting with its extent `first`.
absl::Status OverwritePiece(BlockFile& file, const Slot& slot, uint64_t first) {
  const uint64_t end = first + kOverwriteExtents;
  uint64_t extent = 0;
  absl::Status status;
  for (const ExtentRun& run : slot.runs) {
    for (uint32_t i = 0; i < run.count && status.ok(); ++i, ++extent) {
      if (extent < first || extent >= end) continue;
      status = file.Write((uint64_t{run.first} + i) * limits::kExtentBytes, kZeroExtent);
    }
  }
  return status;
}

}  // namespace

// Bytes to be overwritten keep their record until then: after a crash it gives their position. An object that a restart
// finds by it fails its checksums, or is whole and is erased again.
void SsdEraser::Erase(Slot slot, std::string record, std::function<void()> done) {
  Erasure erasure{std::move(slot), record, std::move(done)};
  if (marked_.erase(erasure.slot.runs.front().first) > 0) {
    queue_.push_back(std::move(erasure));
    return OverwriteNext();
  }
  if (record.empty()) return Finish(erasure);
  commits_.Delete(std::move(record), [this, erasure = std::move(erasure)] { Finish(erasure); });
}

void SsdEraser::Overwrite(Slot slot, std::string record) {
  queue_.push_back({.slot = std::move(slot), .record = std::move(record)});
  OverwriteNext();
}

void SsdEraser::Finish(const Erasure& erasure) {
  free_(erasure.slot);
  if (erasure.done) erasure.done();
}

// Overwrites one slot at a time, and notifies the waiting callers when none is left.
void SsdEraser::OverwriteNext() {
  if (overwriting_) return;
  if (queue_.empty()) {
    if (deleting_ > 0) return;
    for (const Waiter& one : std::exchange(waiters_, {})) one.done(FailureOf(one.tenant));
    return;
  }
  overwriting_ = true;
  Erasure& next = queue_.front();
  if (next.overwritten == 0) next.failed_syncs = commits_.failed_syncs();
  disk_.RunNext(
      [this, slot = next.slot, first = next.overwritten](size_t) { return OverwritePiece(*file_, slot, first); },
      [this](const absl::Status& status) { PieceOverwritten(status); });
}

void SsdEraser::PieceOverwritten(const absl::Status& status) {
  overwriting_ = false;
  Erasure& piece = queue_.front();
  piece.overwritten += kOverwriteExtents;
  if (status.ok() && piece.overwritten < piece.slot.Extents()) return OverwriteNext();
  Erasure erasure = std::move(piece);
  queue_.pop_front();
  if (status.ok()) {
    DeleteRecord(std::move(erasure));
  } else {
    if (erasure.failure.ok()) health_.Failed(status);
    NotOverwritten(std::move(erasure), status);
  }
  OverwriteNext();
}

// Only commits sync the file: after a failed sync earlier writes may be lost, and commits must know that.
void SsdEraser::DeleteRecord(Erasure erasure) {
  ++deleting_;
  const uint64_t failed_syncs = erasure.failed_syncs;
  std::string record = erasure.record.empty() ? std::string(kNoRecord) : erasure.record;
  commits_.Put(std::move(record), std::nullopt, failed_syncs,
               [this, erasure = std::move(erasure)](const CommitQueue::Outcome& outcome) {
                 --deleting_;
                 if (outcome.status.ok()) {
                   Finish(erasure);
                 } else {
                   NotOverwritten(erasure, outcome.status);
                 }
                 OverwriteNext();
               });
}

// The slot stays allocated to the tenant.
void SsdEraser::NotOverwritten(Erasure erasure, const absl::Status& why) {
  erasure.failure = why;
  erasure.overwritten = 0;
  failed_.push_back(std::move(erasure));
}

absl::Status SsdEraser::FailureOf(TenantId tenant) const {
  const auto is_its = [tenant](const Erasure& erasure) { return erasure.slot.tenant == tenant; };
  const auto found = std::ranges::find_if(failed_, is_its);
  return found == failed_.end() ? absl::OkStatus() : found->failure;
}

// Retries for one tenant, or for all without one.
void SsdEraser::RetryOf(std::optional<TenantId> tenant) {
  for (Erasure& erasure : std::exchange(failed_, {})) {
    if (!tenant || erasure.slot.tenant == *tenant) {
      queue_.push_back(std::move(erasure));
    } else {
      failed_.push_back(std::move(erasure));
    }
  }
  OverwriteNext();
}

void SsdEraser::WhenErased(TenantId tenant, std::function<void(absl::Status)> done) {
  commits_.Delete(std::string(kNoRecord), [this, tenant, done = std::move(done)] {
    waiters_.push_back({tenant, done});
    RetryOf(tenant);
  });
}

}  // namespace ashlar::storage
