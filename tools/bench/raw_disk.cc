// SPDX-License-Identifier: Apache-2.0
// The disk's own rate: one file without the page cache, one thread per value in flight, no index.
#include <numeric>

#include "kernels/mutex.h"
#include "storage/tier/block_file.h"
#include "tools/bench/disk_engine.h"
#include "tools/bench/disk_workers.h"

namespace ashlar::bench {
namespace {

// Syncs shared by writers like the tier's commits: one at a time, and later writers wait for the next one.
class SharedSync {
 public:
  explicit SharedSync(storage::BlockFile& file) : file_(file) {}

  absl::Status Wait() {
    MutexLock lock(mutex_);
    const uint64_t mine = ++asked_;
    while (synced_ < mine && status_.ok()) {
      if (running_) {
        ended_.Wait(mutex_);
        continue;
      }
      running_ = true;
      const uint64_t covered = asked_;
      lock.Unlock();
      const absl::Status status = file_.Sync();
      lock.Lock();
      running_ = false;
      synced_ = covered;
      status_.Update(status);
      ended_.NotifyAll();
    }
    return status_;
  }

 private:
  storage::BlockFile& file_;
  Mutex mutex_;
  CondVar ended_;
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t asked_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t synced_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

class RawDisk final : public DiskEngine {
 public:
  RawDisk(std::unique_ptr<storage::BlockFile> file, uint64_t round_bytes)
      : file_(std::move(file)), sync_(*file_), round_bytes_(round_bytes) {}

  absl::Status Fill(size_t values, uint64_t value_bytes) override {
    value_bytes_ = value_bytes;
    std::vector<uint32_t> all(values);
    std::iota(all.begin(), all.end(), 0);
    return Write(all, 4);
  }

  // Writes into the unused half, like a store that keeps the old value until the new one is durable.
  absl::Status Write(const std::vector<uint32_t>& order, int depth) override {
    half_ = 1 - half_;
    Reserve(depth);
    return ForEach(order, depth, [this](uint32_t number, int thread) {
      const absl::Status status = file_->Write(Offset(number), {buffers_[thread].data(), value_bytes_});
      return status.ok() ? sync_.Wait() : status;
    });
  }

  absl::Status Read(const std::vector<uint32_t>& order, int depth) override {
    Reserve(depth);
    return ForEach(order, depth, [this](uint32_t number, int thread) {
      return file_->Read(Offset(number), {buffers_[thread].data(), value_bytes_});
    });
  }

 private:
  uint64_t Offset(uint32_t number) const { return half_ * round_bytes_ + number * value_bytes_; }
  void Reserve(int depth) {
    if (!buffers_.empty() && buffers_[0].size() != value_bytes_) buffers_.clear();
    while (buffers_.size() < static_cast<size_t>(depth)) buffers_.emplace_back(value_bytes_);
  }

  std::unique_ptr<storage::BlockFile> file_;
  SharedSync sync_;
  const uint64_t round_bytes_;
  uint64_t value_bytes_ = 0;
  uint64_t half_ = 0;
  std::vector<PageBuffer> buffers_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DiskEngine>> OpenRawDisk(const std::string& folder, uint64_t round_bytes) {
  auto file = storage::OpenBlockFile(folder + "/raw", 2 * round_bytes);
  if (!file.ok()) return file.status();
  return std::make_unique<RawDisk>(*std::move(file), round_bytes);
}

}  // namespace ashlar::bench
