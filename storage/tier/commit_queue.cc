#include "storage/tier/commit_queue.h"

#include <iterator>
#include <utility>

namespace ashlar::storage {

void CommitQueue::Put(std::string name, std::string value, uint64_t failed_syncs, std::function<void(Outcome)> done) {
  puts_.push_back({std::move(name), std::move(value), failed_syncs, std::move(done)});
  Start();
}

void CommitQueue::Delete(std::string name, std::function<void()> done) {
  deletes_.push_back({std::move(name), std::move(done)});
  Start();
}

void CommitQueue::Retry() {
  if (!deletes_.empty() && !running_) Start();
}

void CommitQueue::Start() {
  wanted_ = running_;
  if (running_) return;
  auto job = std::make_shared<Job>();
  job->deletes = std::exchange(deletes_, {});
  for (PendingPut& put : std::exchange(puts_, {})) {
    (put.failed_syncs == failed_syncs_ ? job->puts : job->given_up).push_back(std::move(put));
  }
  running_ = true;
  disk_.RunNext(
      [this, job](size_t) {
        Work(*job);
        return absl::OkStatus();
      },
      [this, job](const absl::Status&) { Finish(*job); });
}

void CommitQueue::Work(Job& job) const {
  if (!job.puts.empty()) job.synced = file_.Sync();
  std::vector<RecordStore::Change> batch;
  for (const PendingDelete& pending : job.deletes) batch.push_back({pending.name, std::nullopt});
  if (job.synced.ok()) {
    for (PendingPut& put : job.puts) batch.push_back({put.name, std::move(put.value)});
  }
  if (!batch.empty()) job.written = records_.Write(batch);
}

void CommitQueue::Finish(Job& job) {
  running_ = false;
  if (!job.synced.ok()) ++failed_syncs_;
  if (!job.written.ok()) {
    deletes_.insert(deletes_.begin(), std::make_move_iterator(job.deletes.begin()),
                    std::make_move_iterator(job.deletes.end()));
    job.deletes.clear();
  }
  if (wanted_) Start();
  for (const PendingDelete& pending : job.deletes) pending.done();
  const Outcome outcome = job.synced.ok() ? Outcome{job.written, !job.written.ok()} : Outcome{job.synced};
  for (const PendingPut& put : job.puts) put.done(outcome);
  for (const PendingPut& put : job.given_up) put.done({absl::AbortedError("a sync failed after its data was written")});
}

}  // namespace ashlar::storage
