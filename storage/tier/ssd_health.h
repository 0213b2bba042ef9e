// SPDX-License-Identifier: Apache-2.0
// SsdHealth: whether the disk of an SsdTier works. It detects a stalled disk, and probes a degraded one until it
// recovers.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "storage/executor.h"
#include "storage/tier/block_file.h"
#include "storage/tier/commit_queue.h"
#include "storage/tier/disk_queue.h"

namespace ashlar::storage {

// Owned by the metadata thread. While the tier is degraded, deletions of records wait.
class SsdHealth {
 public:
  static constexpr Nanos kDeadline = 3'000'000'000;

  // `recovered` is called when a degraded disk works again. `io` runs the disk's operations.
  SsdHealth(const Executor& io, DiskQueue& disk, CommitQueue& commits, std::function<void()> recovered);
  SsdHealth(const SsdHealth&) = delete;
  SsdHealth& operator=(const SsdHealth&) = delete;

  // The disk is open, and `file` is its slab.
  void Opened(BlockFile& file);
  // The disk cannot be opened, because of `why`.
  void NotOpened(absl::Status why) { status_ = std::move(why); }
  // A write, sync or batch failed.
  void Failed(const absl::Status& status);

  // OK, or why the tier is degraded: the first failed write, sync or batch since it was healthy, the result of the last
  // probe, or a stalled disk. A degraded tier keeps and reads its objects. The cache does not start writes to it
  // (storage/objects/placement.h).
  const absl::Status& status() const { return status_; }
  bool degraded() const { return !status_.ok(); }
  // Returns whether a disk operation has taken longer than kDeadline, as of the latest Tick. It cannot be cancelled:
  // its memory and extents stay in use until it returns. Nothing should wait for the disk meanwhile.
  bool stalled() const { return stalled_; }
  bool probing() const { return probing_; }

  // Call it about once per second. Probes a degraded disk at intervals that grow from one to five seconds.
  void Tick(Nanos now);
  // Probes now: writes and syncs an unused block, then writes a batch of records. Calls `done` with the result known.
  // Returns false, without calling `done`, if the disk is healthy, not open, or being probed.
  bool Probe(std::function<void()> done);

 private:
  void CheckStall(Nanos since_last_tick);
  void Probed(const absl::Status& status);

  const Executor& io_;
  DiskQueue& disk_;
  CommitQueue& commits_;
  const std::function<void()> recovered_;
  BlockFile* file_ = nullptr;  // null without a disk
  absl::Status status_;
  bool stalled_ = false;
  bool stood_still_ = false;  // the process was probably suspended before the latest Tick, not the disk
  bool probing_ = false;
  Nanos now_ = 0, next_probe_ = 0, well_since_ = 0, patience_;
};

}  // namespace ashlar::storage
