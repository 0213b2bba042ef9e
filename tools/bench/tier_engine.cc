// SPDX-License-Identifier: Apache-2.0
// The SSD tier as the cache drives it: one thread owns it, and other threads read and write.
#include <cstring>
#include <deque>
#include <numeric>
#include <thread>

#include "kernels/mutex.h"
#include "proto/limits.h"
#include "storage/tier/ssd_tier.h"
#include "tools/bench/disk_engine.h"
#include "tools/bench/disk_workers.h"

namespace ashlar::bench {
namespace {

constexpr int kThreads = 16;
constexpr storage::TenantId kTenant = 0;
constexpr uint64_t kExtent = limits::kExtentBytes;

// Completions wait for the calling thread, which is the metadata thread.
class DiskThreads final : public storage::Executor {
 public:
  DiskThreads() {
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { Loop(); });
  }
  ~DiskThreads() override {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    work_.NotifyAll();
    for (std::thread& thread : threads_) thread.join();
  }

  bool Run(storage::TenantId, std::function<void()> work, std::function<void()> done) override {
    {
      MutexLock lock(mutex_);
      if (waiting_.size() >= kQueue) return false;
      waiting_.push_back({std::move(work), std::move(done)});
    }
    work_.NotifyOne();
    return true;
  }
  void Post(storage::TenantId, std::function<void()> event) override {
    MutexLock lock(mutex_);
    completed_.push_back(std::move(event));
    done_.NotifyOne();
  }
  void RunUntil(const std::function<bool()>& finished) {
    while (!finished()) {
      MutexLock lock(mutex_);
      while (completed_.empty()) done_.Wait(mutex_);
      const auto completed = std::exchange(completed_, {});
      lock.Unlock();
      for (const auto& done : completed) done();
    }
  }

 private:
  static constexpr size_t kQueue = 256;
  struct Item {
    std::function<void()> work, done;
  };
  void Loop() {
    MutexLock lock(mutex_);
    while (true) {
      while (!stopping_ && waiting_.empty()) work_.Wait(mutex_);
      if (waiting_.empty()) return;
      Item item = std::move(waiting_.front());
      waiting_.pop_front();
      lock.Unlock();
      item.work();
      lock.Lock();
      completed_.push_back(std::move(item.done));
      done_.NotifyOne();
    }
  }

  Mutex mutex_;
  CondVar work_, done_;
  std::deque<Item> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> completed_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// A checkpoint that fills its extents to the last: keys and values of one attention layer.
ObjectHeader HeaderOf(uint32_t number, uint64_t extents) {
  const AttentionLayer attention{.kv_heads = 8, .key_dim = 128, .value_dim = 128};
  Key key;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  const Layout layout{.page_tokens = 8, .layers = {attention}};
  return PlanObject(layout, NamespaceId{}, key, ObjectKind::kCheckpoint, 8 * (4 * extents - 1)).value();
}

class TierEngine final : public DiskEngine {
 public:
  TierEngine(std::unique_ptr<storage::BlockFile> file, std::unique_ptr<storage::RecordStore> records)
      : file_(std::move(file)), records_(std::move(records)) {}

  absl::Status Start(uint64_t capacity_bytes) {
    auto tier = storage::SsdTier::Open({.new_id = {1}}, *file_, *records_, io_);
    if (!tier.ok()) return tier.status();
    tier_ = *std::move(tier);
    if (absl::Status status = tier_->AddTenant(kTenant, "bench", capacity_bytes); !status.ok()) return status;
    return tier_->Recover().status();
  }

  absl::Status Fill(size_t values, uint64_t value_bytes) override {
    size_t erasing = slots_.size();
    for (uint32_t number = 0; number < slots_.size(); ++number) {
      tier_->Erase(kTenant, HeaderOf(number, extents_).key, slots_[number], [&] { --erasing; });
    }
    io_.RunUntil([&] { return erasing == 0; });
    slots_.clear();
    buffers_.clear();
    slots_.resize(values);
    extents_ = value_bytes / kExtent;
    std::vector<uint32_t> all(values);
    std::iota(all.begin(), all.end(), 0);
    return Write(all, 4);
  }

  absl::Status Write(const std::vector<uint32_t>& order, int depth) override {
    std::vector<storage::Slot> fresh;
    for (size_t i = 0; i < order.size(); ++i) {
      auto slot = tier_->Allocate(kTenant, extents_);
      if (!slot.ok()) return slot.status();
      fresh.push_back(*std::move(slot));
    }
    return Move(order, depth, [&](uint32_t number, std::byte* buffer) {
      std::vector<const std::byte*> sources;
      for (uint64_t i = 0; i < extents_; ++i) sources.push_back(buffer + i * kExtent);
      const storage::Slot& slot = fresh[number];
      return tier_->Write(slot, 0, std::move(sources), [this, number, buffer, &slot](absl::Status written) {
        if (!written.ok()) return Finish(buffer, written);
        const ObjectHeader header = HeaderOf(number, extents_);
        tier_->Commit(kTenant, storage::PoolKind::kPublic, header, slot,
                      [this, number, buffer, &slot, key = header.key](absl::Status committed) {
                        if (!committed.ok() || slots_[number].runs.empty()) {
                          slots_[number] = slot;
                          return Finish(buffer, committed);
                        }
                        tier_->Erase(kTenant, key, std::exchange(slots_[number], slot), [this] { --erasing_; });
                        ++erasing_;
                        Finish(buffer, committed);
                      });
      });
    });
  }

  absl::Status Read(const std::vector<uint32_t>& order, int depth) override {
    return Move(order, depth, [&](uint32_t number, std::byte* buffer) {
      std::vector<std::byte*> targets;
      for (uint64_t i = 0; i < extents_; ++i) targets.push_back(buffer + i * kExtent);
      return tier_->Read(slots_[number], 0, std::move(targets), [this, buffer](absl::Status s) { Finish(buffer, s); });
    });
  }

 private:
  // Keeps `depth` values in flight until all are done, including erasures.
  absl::Status Move(const std::vector<uint32_t>& order, int depth,
                    const std::function<bool(uint32_t number, std::byte* buffer)>& start) {
    while (buffers_.size() < static_cast<size_t>(depth)) buffers_.emplace_back(extents_ * kExtent);
    free_.clear();
    for (int i = 0; i < depth; ++i) free_.push_back(buffers_[i].data());
    status_ = absl::OkStatus();
    size_t next = 0;
    while (status_.ok() && next < order.size()) {
      // Refused: it is retried after the next completion.
      while (!free_.empty() && next < order.size() && start(order[next], free_.back())) {
        ++next;
        free_.pop_back();
      }
      const size_t free = free_.size();
      io_.RunUntil([&] { return next == order.size() || free_.size() > free; });
    }
    io_.RunUntil([&] { return free_.size() == static_cast<size_t>(depth) && erasing_ == 0; });
    return status_;
  }

  void Finish(std::byte* buffer, const absl::Status& status) {
    status_.Update(status);
    free_.push_back(buffer);
  }

  std::unique_ptr<storage::BlockFile> file_;
  std::unique_ptr<storage::RecordStore> records_;
  std::unique_ptr<storage::SsdTier> tier_;
  DiskThreads io_;  // destroyed before the objects that its work refers to
  uint64_t extents_ = 0;
  std::vector<storage::Slot> slots_;  // by value
  std::vector<PageBuffer> buffers_;
  std::vector<std::byte*> free_;
  size_t erasing_ = 0;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DiskEngine>> OpenTierEngine(const std::string& folder, uint64_t round_bytes) {
  // One round's values and the ones that they replace.
  auto file = storage::OpenBlockFile(folder + "/slab", storage::SsdTier::SlabBytes(2 * round_bytes));
  if (!file.ok()) return file.status();
  auto records = storage::OpenRecordStore(folder + "/index");
  if (!records.ok()) return records.status();
  auto engine = std::make_unique<TierEngine>(*std::move(file), *std::move(records));
  if (absl::Status status = engine->Start(2 * round_bytes); !status.ok()) return status;
  return engine;
}

}  // namespace ashlar::bench
