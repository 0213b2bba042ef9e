// Erasing objects: their records, their extents, and where it is asked for their bytes.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "proto/limits.h"
#include "storage/tier/ssd_tier.h"

namespace ashlar::storage {
namespace {

constexpr std::string_view kNoRecord = "erased";  // a record that never was: its deletion ends behind those before it

alignas(BlockFile::kBlockBytes) constexpr std::array<std::byte, limits::kExtentBytes> kZeroExtent{};

absl::Status Overwrite(BlockFile& file, const Slot& slot) {
  absl::Status status;
  for (const ExtentRun& run : slot.runs) {
    for (uint32_t i = 0; i < run.count && status.ok(); ++i) {
      status = file.Write((uint64_t{run.first} + i) * limits::kExtentBytes, kZeroExtent);
    }
  }
  return status;
}

}  // namespace

void SsdTier::Erase(TenantId tenant, const Key& key, Slot slot, std::function<void()> done) {
  const auto found = committed_.find(slot.runs.front().first);
  if (found == committed_.end() || tenant != slot.tenant) {
    std::fprintf(stderr, "ssd tier: an erasure of a slot that is not committed\n");
    std::abort();
  }
  const uint64_t sequence = found->second;
  committed_.erase(found);
  commits_.Delete(RecordName(key, sequence), [this, slot = std::move(slot), done = std::move(done)] {
    Release(slot);
    if (done) done();
  });
}

void SsdTier::Release(const Slot& slot) {
  if (to_shred_.erase(slot.runs.front().first) == 0) return GiveBack(slot);
  shredding_.push_back(slot);
  ShredNext();
}

void SsdTier::GiveBack(const Slot& slot) {
  for (const ExtentRun& run : slot.runs) extents_.Give(run);
  tenants_.at(slot.tenant).used_bytes -= slot.Extents() * limits::kExtentBytes;
}

// One slot at a time. Behind the last one the file is synced for those who wait.
void SsdTier::ShredNext() {
  if (shreds_) return;
  if (shredding_.empty()) {
    if (!when_shredded_.empty()) SyncShredded();
    return;
  }
  shreds_ = true;
  if (!shredded_since_) shredded_since_ = commits_.failed_syncs();
  disk_.RunNext([this, slot = shredding_.front()](size_t) { return Overwrite(*file_, slot); },
                [this](const absl::Status& status) {
                  shreds_ = false;
                  shred_error_.Update(status);
                  if (!status.ok()) Failed(status);
                  GiveBack(shredding_.front());
                  shredding_.pop_front();
                  ShredNext();
                });
}

// All syncs of the file are the commits': one that fails leaves what was written before it in doubt, and commits must
// know.
void SsdTier::SyncShredded() {
  shreds_ = true;
  const uint64_t since = shredded_since_.value_or(commits_.failed_syncs());
  commits_.Put(std::string(kNoRecord), std::nullopt, since, [this](CommitQueue::Outcome outcome) {
    shreds_ = false;
    shred_error_.Update(outcome.status);
    if (shredding_.empty()) {
      shredded_since_.reset();
      const absl::Status told = std::exchange(shred_error_, absl::OkStatus());
      for (const auto& done : std::exchange(when_shredded_, {})) done(told);
    }
    ShredNext();
  });
}

void SsdTier::WhenErased(std::function<void(absl::Status)> done) {
  if (!has_disk()) return done(absl::UnavailableError("ssd: the disk cannot be opened"));
  commits_.Delete(std::string(kNoRecord), [this, done = std::move(done)] {
    when_shredded_.push_back(done);
    ShredNext();
  });
}

}  // namespace ashlar::storage
