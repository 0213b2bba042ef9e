// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/disk_queue.h"

#include <utility>

namespace ashlar::storage {

bool DiskQueue::TryRun(TenantId tenant, size_t pieces, Work work, Done done) {
  if (!waiting_.empty()) return false;
  auto batch = std::make_shared<Batch>(Batch{tenant, pieces, std::move(work), std::move(done)});
  if (!Submit(batch)) {
    if (batch->in_flight == 0) return false;
    batch->waits = true;
    waiting_.push_back(std::move(batch));
  }
  return true;
}

void DiskQueue::RunNext(Work work, Done done) {
  auto batch = std::make_shared<Batch>(Batch{kNoTenant, 1, std::move(work), std::move(done)});
  batch->waits = true;
  waiting_.push_front(std::move(batch));
  SubmitWaiting();
}

bool DiskQueue::Submit(const std::shared_ptr<Batch>& batch) {
  while (batch->Unbegun() && batch->in_flight < pieces_in_flight_) {
    auto status = std::make_shared<absl::Status>();
    const bool taken = io_.Run(
        batch->tenant, [batch, status, piece = batch->next] { *status = batch->work(piece); },
        [this, batch, status] { Complete(batch, *status); });
    if (!taken) return false;
    ++batch->next;
    ++batch->in_flight;
  }
  return true;
}

void DiskQueue::Complete(const std::shared_ptr<Batch>& batch, const absl::Status& status) {
  --batch->in_flight;
  batch->status.Update(status);
  // The rest of the batch queues after batches that already wait, so that a large object does not delay others.
  if (batch->Unbegun() && !batch->waits) {
    batch->waits = true;
    waiting_.push_back(batch);
  }
  SubmitWaiting();
  if (batch->in_flight == 0 && !batch->Unbegun()) batch->done(batch->status);
}

void DiskQueue::SubmitWaiting() {
  while (!waiting_.empty() && Submit(waiting_.front())) {
    waiting_.front()->waits = false;
    waiting_.pop_front();
  }
}

}  // namespace ashlar::storage
