// SPDX-License-Identifier: Apache-2.0
// DiskQueue: disk work on a bounded executor, divided into pieces, started in order, and never lost once accepted.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "storage/executor.h"

namespace ashlar::storage {

// Owned by the metadata thread. Work that finds the executor full waits until other work of this queue completes. There
// is always some, because others have at most one job of kNoTenant there, and the executor accepts at least two.
// Work that still waits when the queue is destroyed never runs.
class DiskQueue {
 public:
  // Called on the executor's threads, concurrently for several pieces.
  using Work = std::function<absl::Status(size_t piece)>;
  using Done = std::function<void(absl::Status)>;

  // At most `pieces_in_flight` pieces of one call are in the executor at any time.
  DiskQueue(Executor& io, size_t pieces_in_flight) : io_(io), pieces_in_flight_(pieces_in_flight) {}
  DiskQueue(const DiskQueue&) = delete;
  DiskQueue& operator=(const DiskQueue&) = delete;

  // Runs pieces [0, pieces) of a tenant's work, at least one, and calls `done` with the first error; after an error no
  // further piece starts. Returns false, calling nothing, if the executor is full or other work waits.
  bool TryRun(TenantId tenant, size_t pieces, Work work, Done done);

  // Runs one piece of work for all tenants. It is never refused, and runs before all waiting work. Callers must keep
  // such pieces few.
  void RunNext(Work work, Done done);

 private:
  struct Batch {
    TenantId tenant;
    size_t pieces;
    Work work;
    Done done;
    size_t next = 0;
    size_t in_flight = 0;
    bool waits = false;  // whether it is in waiting_
    absl::Status status;

    bool Unbegun() const { return status.ok() && next < pieces; }
  };

  bool Submit(const std::shared_ptr<Batch>& batch);  // returns false if the executor is full
  void Complete(const std::shared_ptr<Batch>& batch, const absl::Status& status);
  void SubmitWaiting();

  Executor& io_;
  const size_t pieces_in_flight_;
  std::deque<std::shared_ptr<Batch>> waiting_;
};

}  // namespace ashlar::storage
