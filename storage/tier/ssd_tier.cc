// SPDX-License-Identifier: Apache-2.0
#include "storage/tier/ssd_tier.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/limits.h"

namespace ashlar::storage {
namespace {

using limits::kExtentBytes;
constexpr uint64_t kHeaderExtents = 1;  // the first extent contains only the slab's header
constexpr size_t kPieceExtents = 4;     // read or written at a time: 1 MiB
static_assert(kExtentBytes % BlockFile::kBlockBytes == 0 && kSlabHeaderBytes <= BlockFile::kBlockBytes);

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "ssd tier: %s\n", what);
  std::abort();
}

uint32_t FirstExtent(const Slot& slot) {
  Require(!slot.runs.empty(), "a slot must have extents");
  return slot.runs.front().first;
}

// One read (into std::byte) or write (from const std::byte): extents of the slab, and their addresses in memory.
template <typename Byte>
struct Transfer {
  std::vector<uint32_t> extents;
  std::vector<Byte*> memory;

  Transfer(const Slot& slot, uint64_t first, std::vector<Byte*> addresses) : memory(std::move(addresses)) {
    Require(!memory.empty() && first + memory.size() <= slot.Extents(), "extents outside the slot");
    extents.reserve(memory.size());
    for (const ExtentRun& run : slot.runs) {
      const uint64_t skip = std::min<uint64_t>(first, run.count);
      first -= skip;
      for (uint64_t i = skip; i < run.count && extents.size() < memory.size(); ++i) {
        extents.push_back(static_cast<uint32_t>(run.first + i));
      }
    }
  }

  size_t pieces() const { return (extents.size() + kPieceExtents - 1) / kPieceExtents; }

  // One call per range that is contiguous in both the file and memory.
  absl::Status Move(BlockFile& file, size_t piece) const {
    const size_t end = std::min((piece + 1) * kPieceExtents, extents.size());
    absl::Status status;
    for (size_t i = piece * kPieceExtents; i < end && status.ok();) {
      size_t count = 1;
      while (i + count < end && extents[i + count] == extents[i] + count &&
             memory[i + count] == memory[i] + count * kExtentBytes) {
        ++count;
      }
      const std::span<Byte> bytes(memory[i], count * kExtentBytes);
      if constexpr (std::is_const_v<Byte>) {
        status = file.Write(extents[i] * kExtentBytes, bytes);
      } else {
        status = file.Read(extents[i] * kExtentBytes, bytes);
      }
      i += count;
    }
    return status;
  }
};

// What the records of a disk say.
struct Index {
  std::optional<SlabId> manifest;
  std::vector<SsdRecord> objects;
  std::vector<RecordStore::Change> deletions;  // deletes undecodable records
};

absl::StatusOr<Index> LoadIndex(RecordStore& records) {
  Index index;
  const absl::Status loaded = records.Load([&index](std::string_view name, std::string_view value) -> absl::Status {
    if (name == kManifestName) {
      absl::StatusOr<SlabId> id = DecodeManifest(value);
      if (id.ok()) index.manifest = *id;
      return id.status();
    }
    if (!index.manifest.has_value()) return absl::DataLossError("ssd manifest: missing, but records exist");
    if (absl::StatusOr<SsdRecord> record = DecodeRecord(name, value); record.ok()) {
      index.objects.push_back(*std::move(record));
    } else {
      index.deletions.push_back({std::string(name), std::nullopt});
    }
    return absl::OkStatus();
  });
  if (!loaded.ok()) return loaded;
  return index;
}

// Slab and records must belong together. Without a manifest there was never a record, so the slab's bytes are unused.
// The slab's header is durable before the manifest that relies on it.
absl::Status CheckFormat(BlockFile& file, RecordStore& records, const std::optional<SlabId>& manifest,
                         const SlabId& new_id) {
  alignas(BlockFile::kBlockBytes) std::array<std::byte, BlockFile::kBlockBytes> block{};
  if (manifest.has_value()) {
    if (absl::Status status = file.Read(0, block); !status.ok()) return status;
    const absl::StatusOr<SlabId> id = DecodeSlabHeader({reinterpret_cast<const char*>(block.data()), kSlabHeaderBytes});
    if (absl::IsNotFound(id.status())) {
      return absl::DataLossError(
          "ssd slab: empty, but the index describes objects in it; restore the slab, or remove both to start empty");
    }
    if (!id.ok()) return id.status();
    if (*id == *manifest) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "ssd slab: does not match the index; restore the other one, or remove both to start empty");
  }
  const std::string header = EncodeSlabHeader(new_id);
  std::transform(header.begin(), header.end(), block.begin(), [](char byte) { return static_cast<std::byte>(byte); });
  if (absl::Status status = file.Write(0, block); !status.ok()) return status;
  if (absl::Status status = file.Sync(); !status.ok()) return status;
  const RecordStore::Change written{std::string(kManifestName), EncodeManifest(new_id)};
  return records.Write({&written, 1});
}

}  // namespace

uint64_t SsdTier::SlabBytes(uint64_t capacity_bytes) {
  return (kHeaderExtents + capacity_bytes / kExtentBytes) * kExtentBytes;
}

SsdTier::SsdTier(const SsdTierOptions& options, uint64_t extents, Executor& io)
    : slab_extents_(extents),
      disk_(io, options.pieces_in_flight),
      commits_(disk_, [this](const absl::Status& status) { health_.Failed(status); }),
      health_(io, disk_, commits_, [this] { eraser_.Retry(); }),
      eraser_(disk_, commits_, health_, [this](const Slot& slot) { Release(slot); }) {}

absl::StatusOr<std::unique_ptr<SsdTier>> SsdTier::WithoutDisk(const SsdTierOptions& options, uint64_t capacity_bytes,
                                                              Executor& io, absl::Status why) {
  const uint64_t extents = SlabBytes(capacity_bytes) / kExtentBytes;
  if (extents <= kHeaderExtents) {
    return absl::InvalidArgumentError(absl::StrCat("ssd.capacity_bytes: ", capacity_bytes,
                                                   "; expected at least one extent, ", kExtentBytes, " bytes"));
  }
  if (extents > UINT32_MAX) {
    return absl::InvalidArgumentError(absl::StrCat("ssd.capacity_bytes: ", capacity_bytes, "; expected at most ",
                                                   (UINT32_MAX - kHeaderExtents) * kExtentBytes));
  }
  if (options.pieces_in_flight == 0) return absl::InvalidArgumentError("ssd.pieces_in_flight: 0; expected at least 1");
  auto tier = std::unique_ptr<SsdTier>(new SsdTier(options, extents, io));
  if (!why.ok()) tier->health_.NotOpened(std::move(why));
  return tier;
}

absl::StatusOr<std::unique_ptr<SsdTier>> SsdTier::Open(const SsdTierOptions& options, BlockFile& file,
                                                       RecordStore& records, Executor& io) {
  const uint64_t capacity = file.size() / kExtentBytes * kExtentBytes;
  auto made = WithoutDisk(options, capacity - std::min(capacity, kHeaderExtents * kExtentBytes), io, absl::OkStatus());
  if (!made.ok()) return made;
  SsdTier& tier = **made;
  tier.UseDisk(file, records);
  tier.extents_.AddArena(0, static_cast<uint32_t>(tier.slab_extents_));
  Require(tier.extents_.TakeRun({.first = 0, .count = kHeaderExtents}), "no extent left for the header");
  absl::StatusOr<Index> index = LoadIndex(records);
  if (!index.ok()) return index.status();
  if (absl::Status status = CheckFormat(file, records, index->manifest, options.new_id); !status.ok()) return status;
  tier.loaded_ = std::move(index->objects);
  tier.deletions_ = std::move(index->deletions);
  tier.report_.damaged = tier.deletions_.size();
  return made;
}

void SsdTier::Attach(std::unique_ptr<SsdTier> opened) {
  Require(!has_disk() && opened->has_disk() && opened->slab_extents_ == slab_extents_, "another tier's disk");
  UseDisk(*opened->file_, *opened->records_);
  extents_ = std::move(opened->extents_);
  tenants_ = std::move(opened->tenants_);
  committed_ = std::move(opened->committed_);
  next_sequence_ = opened->next_sequence_;
  report_ = std::move(opened->report_);
  unknown_ = std::move(opened->unknown_);
}

void SsdTier::UseDisk(BlockFile& file, RecordStore& records) {
  file_ = &file;
  records_ = &records;
  commits_.Use(file, records);
  eraser_.Use(file);
  health_.Opened(file);
}

absl::Status SsdTier::AddTenant(TenantId tenant, std::string name, uint64_t budget_bytes) {
  if (tenants_.contains(tenant))
    return absl::AlreadyExistsError(absl::StrCat("tenant ", tenant, ": already has a budget"));
  const auto same_name = [&](const auto& other) { return other.second.name == name; };
  if (name.empty() || name.size() > limits::kMaxStringBytes)
    return absl::InvalidArgumentError(
        absl::StrCat("name: ", name.size(), " bytes; expected 1 to ", limits::kMaxStringBytes));
  if (std::any_of(tenants_.begin(), tenants_.end(), same_name)) {
    return absl::InvalidArgumentError(absl::StrCat("name: ", name, " belongs to another tenant"));
  }
  if (budget_bytes < kExtentBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("ssd_bytes: ", budget_bytes, "; expected at least one extent, ", kExtentBytes, " bytes"));
  }
  const uint64_t left = Usage().capacity_bytes - budgets_bytes_;
  budget_bytes = budget_bytes / kExtentBytes * kExtentBytes;
  if (budget_bytes > left) {
    return absl::InvalidArgumentError(
        absl::StrCat("ssd_bytes: ", budget_bytes, " is too large; expected at most ", left,
                     ", the part of ssd.capacity_bytes that is not assigned to other tenants"));
  }
  tenants_[tenant] = {.name = std::move(name), .budget_bytes = budget_bytes};
  budgets_bytes_ += budget_bytes;
  return absl::OkStatus();
}

absl::Status SsdTier::CheckBudget(TenantId tenant, uint64_t budget_bytes) const {
  if (!has_disk()) {
    return absl::FailedPreconditionError(
        "the disk is not open, so the bytes in use are unknown; reload again when ashlarctl status no longer reports "
        "the ssd tier as degraded");
  }
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return absl::NotFoundError(absl::StrCat("tenant ", tenant, ": has no budget"));
  if (budget_bytes < kExtentBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(budget_bytes, "; expected at least one extent, ", kExtentBytes, " bytes"));
  }
  if (budget_bytes / kExtentBytes * kExtentBytes < found->second.used_bytes) {
    return absl::FailedPreconditionError(absl::StrCat(found->second.used_bytes, " bytes are in use; expected at least ",
                                                      found->second.used_bytes, ", or erase objects first"));
  }
  return absl::OkStatus();
}

void SsdTier::SetBudget(TenantId tenant, uint64_t budget_bytes) {
  uint64_t& budget = tenants_.at(tenant).budget_bytes;
  budgets_bytes_ -= budget;
  budget = budget_bytes / kExtentBytes * kExtentBytes;
  budgets_bytes_ += budget;
}

SsdTier::Claim SsdTier::ClaimExtents(const SsdRecord& record, Tenant* tenant) {
  const uint64_t bytes = record.header.Extents() * kExtentBytes;
  if (tenant != nullptr && bytes > tenant->budget_bytes - tenant->used_bytes) return Claim::kOverBudget;
  for (const ExtentRun& run : record.runs) {
    if (run.first < kHeaderExtents || uint64_t{run.first} + run.count > slab_extents_) return Claim::kDamaged;
  }
  for (size_t i = 0; i < record.runs.size(); ++i) {
    if (extents_.TakeRun(record.runs[i])) continue;
    while (i-- > 0) extents_.Give(record.runs[i]);
    return Claim::kSuperseded;
  }
  return Claim::kGranted;
}

absl::StatusOr<std::vector<SsdTier::Recovered>> SsdTier::Recover() {
  std::map<std::string, TenantId> tenants;
  for (const auto& [id, tenant] : tenants_) tenants[tenant.name] = id;
  // Sorted with the latest record first; earlier ones lose contested extents.
  std::sort(loaded_.begin(), loaded_.end(), [](const auto& a, const auto& b) { return a.sequence > b.sequence; });
  std::set<std::tuple<std::string, Key, uint32_t, uint32_t>> seen;  // tenant, key, shard
  std::vector<Recovered> recovered;
  for (SsdRecord& record : std::exchange(loaded_, {})) {
    next_sequence_ = std::max(next_sequence_, record.sequence + 1);
    const auto known = tenants.find(record.tenant);
    Tenant* tenant = known == tenants.end() ? nullptr : &tenants_.at(known->second);
    const TensorShard& shard = record.header.shard;
    const bool latest = seen.emplace(record.tenant, record.header.key, shard.rank, shard.size).second;
    const Claim claim = latest ? ClaimExtents(record, tenant) : Claim::kSuperseded;
    report_.damaged += claim == Claim::kDamaged;
    report_.superseded += claim == Claim::kSuperseded;
    report_.over_budget += claim == Claim::kOverBudget;
    const uint64_t bytes = record.header.Extents() * kExtentBytes;
    if (claim != Claim::kGranted) {
      deletions_.push_back({RecordName(record.header.key, record.sequence), std::nullopt});
    } else if (tenant == nullptr) {
      report_.unknown_tenants[record.tenant] += bytes;
      unknown_[record.tenant].push_back({.ns = record.header.ns,
                                         .runs = std::move(record.runs),
                                         .record = RecordName(record.header.key, record.sequence),
                                         .bytes = bytes});
    } else {
      tenant->used_bytes += bytes;
      report_.bytes += bytes;
      committed_[record.runs.front().first] = record.sequence;
      recovered.push_back({.tenant = known->second,
                           .pool = record.pool,
                           .header = std::move(record.header),
                           .slot = {known->second, std::move(record.runs)}});
    }
  }
  report_.objects = recovered.size();
  // An orphan's extents may be reused from now on, so it must never be found again.
  const std::vector<RecordStore::Change> deletions = std::exchange(deletions_, {});
  if (absl::Status status = deletions.empty() ? absl::OkStatus() : records_->Write(deletions); !status.ok()) {
    return status;
  }
  std::reverse(recovered.begin(), recovered.end());
  return recovered;
}

absl::StatusOr<Slot> SsdTier::Allocate(TenantId tenant, uint64_t extents) {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return absl::ResourceExhaustedError(absl::StrCat("tenant ", tenant, ": has no budget"));
  if (extents == 0) return absl::InvalidArgumentError("extents: 0; expected at least 1");
  Tenant& owner = found->second;
  const bool in_budget = extents <= (owner.budget_bytes - owner.used_bytes) / kExtentBytes;
  if (!in_budget || extents > extents_.free_extents()) {
    commits_.Retry();
    return absl::ResourceExhaustedError(in_budget ? "ssd: objects of tenants that are not configured fill the slab"
                                                  : absl::StrCat("tenant ", tenant, ": ssd budget is used up"));
  }
  owner.used_bytes += extents * kExtentBytes;
  Slot slot{.tenant = tenant, .runs = extents_.Take(extents)};
  uncommitted_[FirstExtent(slot)].written.resize(extents);
  return slot;
}

void SsdTier::Free(Slot slot) {
  const auto found = uncommitted_.find(FirstExtent(slot));
  Require(found != uncommitted_.end(), "freed a slot that is not allocated, or is committed");
  Require(found->second.writes_in_flight == 0 && !found->second.committing, "freed a slot during a write");
  std::string unresolved = std::move(found->second.unresolved);
  uncommitted_.erase(found);
  eraser_.Erase(std::move(slot), std::move(unresolved), nullptr);
}

void SsdTier::Release(const Slot& slot) {
  for (const ExtentRun& run : slot.runs) extents_.Give(run);
  const auto tenant = tenants_.find(slot.tenant);  // none: the record of an unknown tenant
  if (tenant != tenants_.end()) tenant->second.used_bytes -= slot.Extents() * kExtentBytes;
}

TierUsage SsdTier::Usage(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return {};
  return {found->second.budget_bytes, found->second.used_bytes, found->second.used_bytes};
}

TierUsage SsdTier::Usage() const {
  const uint64_t capacity = (slab_extents_ - kHeaderExtents) * kExtentBytes;
  const uint64_t used = has_disk() ? capacity - extents_.free_extents() * kExtentBytes : 0;
  return {capacity, used, used};
}

bool SsdTier::Write(const Slot& slot, uint64_t first, std::vector<const std::byte*> sources,
                    std::function<void(absl::Status)> done) {
  const auto found = uncommitted_.find(FirstExtent(slot));
  Require(found != uncommitted_.end() && !found->second.committing, "write to a slot that is not open for writes");
  const uint64_t count = sources.size();
  auto transfer = std::make_shared<const Transfer<const std::byte>>(slot, first, std::move(sources));
  const bool taken = disk_.TryRun(
      slot.tenant, transfer->pieces(), [this, transfer](size_t piece) { return transfer->Move(*file_, piece); },
      [this, key = found->first, first, count, done = std::move(done)](const absl::Status& status) {
        Uncommitted& written_to = uncommitted_.at(key);
        --written_to.writes_in_flight;
        written_to.failed = written_to.failed || !status.ok();
        if (!status.ok()) health_.Failed(status);
        std::fill_n(written_to.written.begin() + static_cast<ptrdiff_t>(first), count, true);
        done(status);
      });
  if (!taken) return false;
  Uncommitted& state = found->second;
  if (!std::exchange(state.begun, true)) state.failed_syncs = commits_.failed_syncs();
  ++state.writes_in_flight;
  return true;
}

bool SsdTier::Read(const Slot& slot, uint64_t first, std::vector<std::byte*> targets,
                   std::function<void(absl::Status)> done) {
  auto transfer = std::make_shared<const Transfer<std::byte>>(slot, first, std::move(targets));
  return disk_.TryRun(
      slot.tenant, transfer->pieces(), [this, transfer](size_t piece) { return transfer->Move(*file_, piece); },
      std::move(done));
}

absl::Status SsdTier::CheckCommit(const ObjectHeader& header, const Slot& slot) const {
  const Uncommitted& state = uncommitted_.at(FirstExtent(slot));
  if (state.failed) return absl::AbortedError("ssd: a write of the object failed");
  if (header.Extents() != slot.Extents())
    return absl::InvalidArgumentError("header: number of extents does not match the slot");
  if (state.writes_in_flight > 0 || std::count(state.written.begin(), state.written.end(), false) > 0) {
    return absl::FailedPreconditionError("ssd: an extent of the object was not written");
  }
  return absl::OkStatus();
}

void SsdTier::Commit(TenantId tenant, PoolKind pool, const ObjectHeader& header, const Slot& slot,
                     std::function<void(absl::Status)> done) {
  const uint32_t key = FirstExtent(slot);
  const auto found = uncommitted_.find(key);
  Require(found != uncommitted_.end() && !found->second.committing, "commit of a slot that is not open for writes");
  Require(tenant == slot.tenant, "commit for another tenant");
  if (absl::Status status = CheckCommit(header, slot); !status.ok()) {
    disk_.RunNext([status](size_t) { return status; }, std::move(done));
    return;
  }
  found->second.committing = true;
  const SsdRecord record{next_sequence_++, tenants_.at(tenant).name, pool, slot.runs, header};
  std::string name = RecordName(header.key, record.sequence);
  commits_.Put(name, EncodeRecord(record), found->second.failed_syncs,
               [this, key, name, sequence = record.sequence, done = std::move(done)](CommitQueue::Outcome outcome) {
                 if (outcome.status.ok()) {
                   uncommitted_.erase(key);
                   committed_[key] = sequence;
                 } else {
                   Uncommitted& state = uncommitted_.at(key);
                   state.committing = false;
                   state.failed = true;
                   if (outcome.unresolved) state.unresolved = name;
                 }
                 done(outcome.status);
               });
}

void SsdTier::Erase(TenantId tenant, const Key& key, Slot slot, std::function<void()> done) {
  const auto found = committed_.find(FirstExtent(slot));
  Require(found != committed_.end() && tenant == slot.tenant, "erasure of an uncommitted slot");
  std::string record = RecordName(key, found->second);
  committed_.erase(found);
  eraser_.Erase(std::move(slot), std::move(record), std::move(done));
}

SsdTier::Erased SsdTier::EraseUnknown(const std::string& name, const std::optional<NamespaceId>& ns, TenantId as) {
  Erased erased;
  const auto found = unknown_.find(name);
  if (found == unknown_.end()) return erased;
  std::erase_if(found->second, [&](Unknown& one) {
    if (ns && one.ns != *ns) return false;
    ++erased.objects;
    erased.bytes += one.bytes;
    eraser_.Overwrite({as, std::move(one.runs)}, std::move(one.record));
    return true;
  });
  report_.unknown_tenants.at(name) -= erased.bytes;
  if (found->second.empty()) {
    unknown_.erase(found);
    report_.unknown_tenants.erase(name);
  }
  return erased;
}

void SsdTier::WhenErased(TenantId tenant, std::function<void(absl::Status)> done) {
  if (!has_disk()) return done(absl::UnavailableError("ssd: the disk is not open"));
  eraser_.WhenErased(tenant, std::move(done));
}

}  // namespace ashlar::storage
