// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/world.h"

#include <cstdlib>
#include <utility>

#include "proto/limits.h"

namespace ashlar::simulation {

using storage::ExtentRun;
using storage::Slot;
using storage::TenantId;
using storage::TierUsage;

absl::StatusOr<Slot> FaultyTier::Allocate(TenantId tenant, uint64_t extents) {
  if (bug_ == Bug::kSharesExtents && last_ && last_->tenant == tenant && last_->Extents() >= extents &&
      random_() % 4 == 0) {
    Slot again = *last_;
    (void)again.SplitAfter(extents);
    for (const ExtentRun& run : again.runs) {
      for (uint32_t i = 0; i < run.count; ++i) ++shared_[{run.arena, run.first + i}];
    }
    return again;
  }
  const bool crosses = bug_ == Bug::kCrossesTenants && random_() % 4 == 0;
  absl::StatusOr<Slot> slot = memory_.Allocate(crosses ? kTenants + 1 - tenant : tenant, extents);
  if (!slot.ok()) return slot;
  last_ = *slot;
  for (const ExtentRun& run : slot->runs) {
    for (uint32_t i = 0; i < run.count; ++i) lent_[{run.arena, run.first + i}] = slot->tenant;
  }
  return slot;
}

bool FaultyTier::WhenGrown(TenantId tenant, uint64_t /*extents*/, std::function<void(bool)> call) {
  if (growth_() % 8 != 0) return false;
  const bool grown = growth_() % 4 != 0;
  return system_.Run(
      tenant, [] {}, [call = std::move(call), grown] { call(grown); });
}

void FaultyTier::Free(Slot slot) {
  if (bug_ == Bug::kNeverFrees && random_() % 4 == 0) return;
  Slot own{.tenant = slot.tenant};
  for (const ExtentRun& run : slot.runs) {
    for (uint32_t i = 0; i < run.count; ++i) {
      const auto shared = shared_.find({run.arena, run.first + i});
      if (shared != shared_.end() && shared->second > 0) {
        --shared->second;  // its other owner will free it
      } else {
        own.runs.push_back({run.arena, run.first + i, 1});
        lent_.erase({run.arena, run.first + i});
      }
    }
  }
  memory_.Free(shared_.empty() ? std::move(slot) : std::move(own));
}

absl::Status FaultyFile::Write(uint64_t offset, std::span<const std::byte> source) {
  // After the slab's header, where nothing else is written.
  const bool probe = offset == kBlockBytes && source.size() == kBlockBytes;
  if (probe && bug_ == Bug::kRefusesProbes) return absl::UnavailableError("refused by mistake");
  return file_.Write(offset, source);
}

void FaultyTier::Empty() {
  for (const auto& [extent, tenant] : lent_) {
    memory_.Free({.tenant = tenant, .runs = {{extent.first, extent.second, 1}}});
  }
  lent_.clear();
  shared_.clear();
  last_.reset();
}

TierUsage FaultyTier::Usage(TenantId tenant) const {
  TierUsage usage = memory_.Usage(tenant);
  if (bug_ != Bug::kIgnoresBudgets && bug_ != Bug::kCrossesTenants) {
    usage.capacity_bytes /= 2;  // the other half is only for those two
  }
  return usage;
}

namespace {

std::unique_ptr<storage::MemoryTier> MakeMemory(uint64_t extents, TierKind kind) {
  return extents == 0 ? nullptr : storage::TestTier({{1, 2 * extents}, {2, 2 * extents}}, kind);
}

}  // namespace

World::World(uint64_t seed, const Sizes& its_sizes, Bug its_bug)
    : sizes(its_sizes),
      bug(its_bug),
      random(seed),
      disk(storage::SsdTier::SlabBytes(kTenants * its_sizes.ssd * limits::kExtentBytes), seed + 1),
      probed_file(disk.file(), its_bug),
      executor(its_bug != Bug::kServesInOrder, seed + 2, clock),
      io(its_bug != Bug::kServesInOrder, seed + 3, clock),
      hbm(MakeMemory(its_sizes.hbm, TierKind::kHbm)),
      dram(MakeMemory(its_sizes.dram, TierKind::kDram)),
      faulty_hbm(hbm == nullptr ? nullptr : std::make_unique<FaultyTier>(*hbm, its_bug, random, seed + 4, executor)),
      faulty_dram(std::make_unique<FaultyTier>(*dram, its_bug, random, seed + 5, executor)) {
  executor.set_threads(sizes.threads);
  io.set_threads(sizes.threads);
  if (bug == Bug::kHidesHangs) io.HideHang();
  Start();
}

void World::Start() {
  auto opened = storage::SsdTier::Open({}, probed_file, disk.records(), io);
  if (!opened.ok()) std::abort();
  ssd = *std::move(opened);
  for (TenantId tenant = 1; tenant <= kTenants; ++tenant) {
    if (!ssd->AddTenant(tenant, "tenant" + std::to_string(tenant), sizes.ssd * limits::kExtentBytes).ok()) std::abort();
  }
  auto recovered = ssd->Recover();
  if (!recovered.ok()) std::abort();
  storage::Tiers tiers{.ssd = ssd.get()};
  if (hbm != nullptr) tiers.memory.push_back(faulty_hbm.get());
  tiers.memory.push_back(faulty_dram.get());
  mover.emplace(kernels::Host(), workers, executor, *tiers.memory.front(), /*turn_bytes=*/1);
  storage::CacheOptions options{.random = [this] { return random(); }};
  options.objects.admission_keys = 64;
  options.objects.copy_transitions = &copy_transitions;
  options.objects.admission = static_cast<storage::AdmissionMode>(random() % 3);
  cache.emplace(std::move(options), tiers, *mover, executor, clock, &observer);
  cache->retention().SetTimeToLive(kExpiringTenant, bug == Bug::kExpiresEarly ? sizes.ttl / 2 : sizes.ttl);
  for (TenantId tenant = 1; tenant <= kTenants && bug != Bug::kIgnoresShares; ++tenant) {
    cache->SetBounds(tenant, {.in_flight = storage::InFlight::Bounds{.calls = sizes.in_flight}});
  }
  cache->adoption().Adopt(*std::move(recovered));
  pools.emplace();
}

void World::CrashAndRestart() {
  disk.Crash();
  pools.reset();
  cache.reset();
  mover.reset();
  ssd.reset();
  executor.Kill();
  io.Kill();
  io.Hang(false);
  if (hbm != nullptr) faulty_hbm->Empty();
  faulty_dram->Empty();
  disk.set_faults({});
  disk.Restart();
  Start();
}

}  // namespace ashlar::simulation
