// SPDX-License-Identifier: Apache-2.0
// Erases objects: their records, their extents and, if requested, their bytes.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "proto/limits.h"
#include "storage/tier/ssd_tier.h"

namespace ashlar::storage {
namespace {

constexpr std::string_view kNoRecord =
    "erased";  // name of a record that never exists: its deletion completes after all earlier ones

alignas(BlockFile::kBlockBytes) constexpr std::array<std::byte, limits::kExtentBytes> kZeroExtent{};

constexpr uint64_t kShredExtents = 4;  // overwritten at a time, because the disk's deadline applies to one piece

// Overwrites a piece of the slot, starting with its extent `first`.
absl::Status Overwrite(BlockFile& file, const Slot& slot, uint64_t first) {
  const uint64_t end = first + kShredExtents;
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

void SsdTier::Erase(TenantId tenant, const Key& key, Slot slot, std::function<void()> done) {
  const auto found = committed_.find(slot.runs.front().first);
  if (found == committed_.end() || tenant != slot.tenant) {
    std::fprintf(stderr, "ssd tier: erasure of an uncommitted slot\n");
    std::abort();
  }
  std::string record = RecordName(key, found->second);
  committed_.erase(found);
  Leave({std::move(slot), std::move(record), std::move(done)});
}

// Bytes to be overwritten keep their record until then: after a crash it gives their position. An object that a restart
// finds by it fails its checksums, or is whole and is erased again.
void SsdTier::Leave(Leaving leaving) {
  if (to_shred_.erase(leaving.slot.runs.front().first) > 0) {
    shredding_.push_back(std::move(leaving));
    return ShredNext();
  }
  if (leaving.record.empty()) return Left(leaving);
  std::string record = leaving.record;
  commits_.Delete(std::move(record), [this, leaving = std::move(leaving)] { Left(leaving); });
}

void SsdTier::Left(const Leaving& leaving) {
  for (const ExtentRun& run : leaving.slot.runs) extents_.Give(run);
  const auto tenant = tenants_.find(leaving.slot.tenant);  // none: the record of an unknown tenant
  if (tenant != tenants_.end()) tenant->second.used_bytes -= leaving.slot.Extents() * limits::kExtentBytes;
  if (leaving.done) leaving.done();
}

// Overwrites one slot at a time, and notifies the waiting callers when none is left.
void SsdTier::ShredNext() {
  if (shreds_) return;
  if (shredding_.empty()) {
    if (shreds_ending_ > 0) return;
    for (const WhenShredded& one : std::exchange(when_shredded_, {})) one.done(Unshredded(one.tenant));
    return;
  }
  shreds_ = true;
  Leaving& next = shredding_.front();
  if (next.overwritten == 0) next.failed_syncs = commits_.failed_syncs();
  disk_.RunNext([this, slot = next.slot, first = next.overwritten](size_t) { return Overwrite(*file_, slot, first); },
                [this](const absl::Status& status) { Shredded(status); });
}

void SsdTier::Shredded(const absl::Status& status) {
  shreds_ = false;
  Leaving& piece = shredding_.front();
  piece.overwritten += kShredExtents;
  if (status.ok() && piece.overwritten < piece.slot.Extents()) return ShredNext();
  Leaving leaving = std::move(piece);
  shredding_.pop_front();
  if (status.ok()) {
    EndShred(std::move(leaving));
  } else {
    if (leaving.refused.ok()) Failed(status);
    NotShredded(std::move(leaving), status);
  }
  ShredNext();
}

// Only commits sync the file: a failed sync puts earlier writes in doubt, and commits must know that.
void SsdTier::EndShred(Leaving leaving) {
  ++shreds_ending_;
  const uint64_t failed_syncs = leaving.failed_syncs;
  std::string record = leaving.record.empty() ? std::string(kNoRecord) : leaving.record;
  commits_.Put(std::move(record), std::nullopt, failed_syncs,
               [this, leaving = std::move(leaving)](const CommitQueue::Outcome& outcome) {
                 --shreds_ending_;
                 if (outcome.status.ok()) {
                   Left(leaving);
                 } else {
                   NotShredded(leaving, outcome.status);
                 }
                 ShredNext();
               });
}

// The slot stays allocated to the tenant.
void SsdTier::NotShredded(Leaving leaving, const absl::Status& why) {
  leaving.refused = why;
  leaving.overwritten = 0;
  unshredded_.push_back(std::move(leaving));
}

absl::Status SsdTier::Unshredded(TenantId tenant) const {
  const auto is_its = [tenant](const Leaving& leaving) { return leaving.slot.tenant == tenant; };
  const auto found = std::ranges::find_if(unshredded_, is_its);
  return found == unshredded_.end() ? absl::OkStatus() : found->refused;
}

// Retries for one tenant, or for all without one.
void SsdTier::ShredAgain(std::optional<TenantId> tenant) {
  for (Leaving& leaving : std::exchange(unshredded_, {})) {
    if (!tenant || leaving.slot.tenant == *tenant) {
      shredding_.push_back(std::move(leaving));
    } else {
      unshredded_.push_back(std::move(leaving));
    }
  }
  ShredNext();
}

SsdTier::Erased SsdTier::EraseUnknown(const std::string& name, const std::optional<NamespaceId>& ns, TenantId as) {
  Erased erased;
  const auto found = unknown_.find(name);
  if (found == unknown_.end()) return erased;
  std::erase_if(found->second, [&](Unknown& one) {
    if (ns && one.ns != *ns) return false;
    ++erased.objects;
    erased.bytes += one.bytes;
    shredding_.push_back({.slot = {as, std::move(one.runs)}, .record = std::move(one.record)});
    return true;
  });
  report_.unknown_tenants.at(name) -= erased.bytes;
  if (found->second.empty()) {
    unknown_.erase(found);
    report_.unknown_tenants.erase(name);
  }
  ShredNext();
  return erased;
}

void SsdTier::WhenErased(TenantId tenant, std::function<void(absl::Status)> done) {
  if (!has_disk()) return done(absl::UnavailableError("ssd: the disk is not open"));
  commits_.Delete(std::string(kNoRecord), [this, tenant, done = std::move(done)] {
    when_shredded_.push_back({tenant, done});
    ShredAgain(tenant);
  });
}

}  // namespace ashlar::storage
