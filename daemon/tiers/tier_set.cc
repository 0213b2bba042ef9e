// SPDX-License-Identifier: Apache-2.0
#include "daemon/tiers/tier_set.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/runtime/log.h"
#include "storage/tier/disk_error.h"

namespace ashlar::daemon {
namespace {

using storage::TenantId;

constexpr storage::Nanos kSecond = 1'000'000'000;
constexpr int kSlowestRetry = 5;  // in seconds, between attempts to open the disk
constexpr size_t kAdoptedAtOnce = 1024;
constexpr const char* kDiskThread = "disk";
constexpr std::chrono::seconds kDestructorPatience{1};

absl::StatusOr<std::unique_ptr<storage::MemoryTier>> MakeMemory(const v1::Config& config,
                                                                const storage::MemoryTierOptions& options,
                                                                uint64_t (v1::Tenant::*budget)() const) {
  absl::StatusOr<std::unique_ptr<storage::MemoryTier>> tier = storage::MemoryTier::Make(options);
  if (!tier.ok()) return tier;
  for (int i = 0; i < config.tenants_size(); ++i) {
    absl::Status added = (*tier)->AddTenant(static_cast<TenantId>(i), (config.tenants(i).*budget)());
    if (!added.ok()) return added;
  }
  return tier;
}

storage::ArenaOptions ArenasFrom(const v1::Dram& dram, std::span<const kernels::Gpu* const> gpus) {
  // All GPUs can access what the first one can.
  storage::ArenaOptions options{
      .huge_pages = dram.huge_pages(), .lock = dram.lock(), .gpu = gpus.empty() ? nullptr : gpus.front()};
  using Mode = storage::NumaPolicy::Mode;
  const std::string& policy = dram.numa().policy();
  if (policy == "bind") options.numa.mode = Mode::kBind;
  if (policy == "preferred") options.numa.mode = Mode::kPreferred;
  if (policy == "interleave") options.numa.mode = Mode::kInterleave;
  options.numa.nodes.assign(dram.numa().nodes().begin(), dram.numa().nodes().end());
  return options;
}

struct PoolFloor {
  storage::PoolKind kind;
  const v1::Floor* floor;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TierSet>> TierSet::Make(const v1::Config& config, EventLoop& loop,
                                                       std::span<const kernels::Gpu* const> gpus) {
  std::unique_ptr<TierSet> set(new TierSet());
  for (const v1::Hbm& tier : config.hbm()) {
    const kernels::Gpu* gpu = nullptr;
    for (size_t i = 0; i < gpus.size(); ++i) {
      if (config.gpu(static_cast<int>(i)).device() == tier.device()) gpu = gpus[i];
    }
    auto hbm = MakeMemory(config,
                          {.kind = TierKind::kHbm,
                           .capacity_bytes = tier.capacity_bytes(),
                           .arena_bytes = tier.arena_bytes(),
                           .arena = {.gpu = gpu},
                           .on_gpu = gpu != nullptr,
                           .first_arena = static_cast<uint32_t>(set->hbm_.size()) * storage::kArenasApart},
                          &v1::Tenant::hbm_bytes);
    if (!hbm.ok()) return hbm.status();
    set->hbm_.push_back(*std::move(hbm));
    if (gpu == nullptr) Log(LogLevel::kWarning, "no GPU is configured; the hbm tier is in host memory");
  }
  auto dram = MakeMemory(config,
                         {.kind = TierKind::kDram,
                          .capacity_bytes = config.dram().capacity_bytes(),
                          .arena_bytes = config.dram().arena_bytes(),
                          .arena = ArenasFrom(config.dram(), gpus),
                          .first_arena = static_cast<uint32_t>(set->hbm_.size()) * storage::kArenasApart},
                         &v1::Tenant::dram_bytes);
  if (!dram.ok()) return dram.status();
  set->dram_ = *std::move(dram);
  set->tenants_ = static_cast<size_t>(config.tenants_size());
  set->arena_bytes_ = config.dram().arena_bytes();
  set->arenas_ = std::make_unique<WorkerPool>(1, set->tenants_, loop);
  set->dram_->CreateOn(
      [set = set.get()](TenantId tenant, const auto& arena) { return set->CreateArena(tenant, arena); });
  if (config.ssd().folder().empty()) return set;
  if (absl::Status status = set->OpenDisk(config, loop); !status.ok()) return status;
  return set;
}

// Called after StopDisk, or if the daemon cannot start: then an attempt to open the disk may hang.
TierSet::~TierSet() {
  if (!StopDisk(kDestructorPatience)) static_cast<void>(io_.release());
}

absl::Status TierSet::OpenDisk(const v1::Config& config, EventLoop& loop) {
  loop_ = &loop;
  io_ = std::make_unique<WorkerPool>(static_cast<int>(config.ssd().threads()), config.ssd().queue_depth(), loop,
                                     /*spare_threads=*/0, kDiskThread);
  open_ = [config, io = io_.get()] { return OpenSsdDisk(config, *io); };
  absl::StatusOr<SsdDisk> disk = absl::UnavailableError(absl::StrCat(
      "ssd.folder ", config.ssd().folder(), ": the disk was not opened within ", kOpenPatience.count(), " s"));
  if (StartOpening() && opened_.wait_for(kOpenPatience) == std::future_status::ready) disk = opened_.get();
  if (disk.ok()) {
    open_ = nullptr;
    file_ = std::move(disk->file);
    records_ = std::move(disk->records);
    ssd_ = std::move(disk->tier);
    recovered_ = std::move(disk->recovered);
    quarantined_ += disk->quarantined ? 1 : 0;
    return absl::OkStatus();
  }
  if (!storage::MayPass(disk.status())) return disk.status();
  auto tier = storage::SsdTier::WithoutDisk({}, config.ssd().capacity_bytes(), *io_, disk.status());
  if (!tier.ok()) return tier.status();
  ssd_ = *std::move(tier);
  return AddSsdTenants(config, *ssd_);
}

// One after the other, tenants in turn: arenas that callers wait for are created in between.
void TierSet::PrepareArenas() {
  for (size_t i = 0; i < tenants_ && creating_ == 0; ++i) PrepareArena(static_cast<TenantId>(next_++ % tenants_));
}

void TierSet::PrepareArena(TenantId tenant) {
  const storage::TierUsage here = dram_->Usage(tenant);
  const uint64_t below = ssd_ == nullptr ? 0 : ssd_->Usage(tenant).used_bytes;
  if (here.held_bytes == 0 && below == 0) return;
  dram_->GrowTo(tenant, std::max(here.used_bytes + arena_bytes_, below));
}

// As the daemon's own work: lookups that wait for the arena delay their tenant's completions. A tenant has at most one
// job in the queue.
bool TierSet::CreateArena(TenantId tenant, const std::shared_ptr<storage::ComingArena>& arena) {
  const auto made = [this, tenant, arena] {
    --creating_;
    if (dram_->Prepared(tenant, arena).ok()) PrepareArenas();
  };
  const bool started = arenas_->Run(
      storage::kNoTenant, [arena] { arena->MakeAhead(); }, made);
  creating_ += started ? 1 : 0;
  return started;
}

bool TierSet::StartOpening() {
  const auto opened = std::make_shared<std::promise<absl::StatusOr<SsdDisk>>>();
  opened_ = opened->get_future();
  const bool begun = io_->Run(
      storage::kNoTenant, [opened, open = open_] { opened->set_value(open()); }, [] {});
  if (!begun) opened_ = {};
  return begun;
}

void TierSet::Tick(storage::Cache& cache) {
  PrepareArenas();
  if (open_ == nullptr) return;
  if (!opened_.valid()) {
    if (--ticks_left_ <= 0) StartOpening();
  } else if (opened_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
    Attach(opened_.get(), cache);
  }
}

void TierSet::Attach(absl::StatusOr<SsdDisk> opened, storage::Cache& cache) {
  patience_ = std::min(2 * patience_, kSlowestRetry);
  ticks_left_ = patience_;
  if (!opened.ok()) return ssd_->StillWithoutDisk(opened.status());
  open_ = nullptr;
  file_ = std::move(opened->file);
  records_ = std::move(opened->records);
  quarantined_ += opened->quarantined ? 1 : 0;
  ssd_->Attach(std::move(opened->tier));
  // Many objects are recovered in steps: a million would delay engines by a second.
  auto recovered = std::make_shared<std::vector<storage::SsdTier::Recovered>>(std::move(opened->recovered));
  cache.adoption().Adopt({}, !recovered->empty());
  for (size_t first = 0; first < recovered->size(); first += kAdoptedAtOnce) {
    loop_->PostCompletion(storage::kNoTenant, [recovered, first, &cache] {
      const auto begin = recovered->begin() + static_cast<ptrdiff_t>(first);
      const size_t count = std::min(kAdoptedAtOnce, recovered->size() - first);
      cache.adoption().Adopt(
          {std::make_move_iterator(begin), std::make_move_iterator(begin + static_cast<ptrdiff_t>(count))},
          first + count < recovered->size());
    });
  }
}

storage::Tiers TierSet::tiers() const {
  storage::Tiers tiers{.ssd = ssd_.get(), .sibling_count = std::max<size_t>(hbm_.size(), 1)};
  for (storage::MemoryTier* tier : memory()) tiers.memory.push_back(tier);
  tiers.common = &common() == dram_.get() ? hbm_.size() : 0;
  return tiers;
}

std::optional<size_t> TierSet::LevelOf(const kernels::Gpu& gpu) const {
  for (size_t level = 0; level < hbm_.size(); ++level) {
    if (hbm_[level]->gpu() == &gpu) return level;
  }
  return std::nullopt;
}

std::vector<storage::MemoryTier*> TierSet::memory() const {
  std::vector<storage::MemoryTier*> memory;
  for (const auto& hbm : hbm_) memory.push_back(hbm.get());
  memory.push_back(dram_.get());
  return memory;
}

std::vector<const storage::MemoryTier*> TierSet::mapped() const {
  const std::vector<storage::MemoryTier*> all = memory();
  return {all.begin(), all.end()};
}

void TierSet::Configure(const v1::Config& config, storage::Cache& cache) {
  for (int i = 0; i < config.tenants_size(); ++i) {
    const v1::Tenant& tenant = config.tenants(i);
    const auto id = static_cast<TenantId>(i);
    for (const PoolFloor& pool : {PoolFloor{storage::PoolKind::kPublic, &tenant.public_floor()},
                                  PoolFloor{storage::PoolKind::kPrivate, &tenant.private_floor()}}) {
      size_t tier = 0;
      for (size_t hbm = 0; hbm < hbm_.size(); ++hbm) cache.SetFloor(tier++, {id, pool.kind}, pool.floor->hbm_bytes());
      cache.SetFloor(tier++, {id, pool.kind}, pool.floor->dram_bytes());
      if (ssd_ != nullptr) cache.SetFloor(tier, {id, pool.kind}, pool.floor->ssd_bytes());
    }
    cache.SetBounds(
        id, {.in_flight = storage::InFlight::Bounds{.calls = tenant.max_landings(), .bytes = tenant.landing_bytes()},
             .prefix_bytes = tenant.prefix_bytes(),
             .leases = storage::TenantBounds::Leases{tenant.max_leases(), tenant.max_leased_segments()}});
    cache.byte_rates().SetLimit(id, tenant.bytes_per_second());
    cache.retention().SetTimeToLive(id, static_cast<storage::Nanos>(tenant.ttl_seconds()) * kSecond);
  }
  if (!recovered_.empty()) cache.adoption().Adopt(std::exchange(recovered_, {}));
  PrepareArenas();
}

absl::Status TierSet::CheckBudgets(const v1::Config& now, const v1::Config& next) const {
  for (int i = 0; i < next.tenants_size(); ++i) {
    const v1::Tenant &before = now.tenants(i), &after = next.tenants(i);
    const auto id = static_cast<TenantId>(i);
    const auto named = [i](absl::string_view field, const absl::Status& status) {
      return absl::FailedPreconditionError(absl::StrCat("tenants[", i, "].", field, ": ", status.message()));
    };
    if (before.dram_bytes() != after.dram_bytes()) {
      if (absl::Status able = dram_->CheckBudget(id, after.dram_bytes()); !able.ok()) return named("dram_bytes", able);
    }
    for (const auto& hbm : hbm_) {
      if (before.hbm_bytes() == after.hbm_bytes()) continue;
      if (absl::Status able = hbm->CheckBudget(id, after.hbm_bytes()); !able.ok()) return named("hbm_bytes", able);
    }
    if (before.ssd_bytes() == after.ssd_bytes() || ssd_ == nullptr) continue;
    if (before.ssd_bytes() == 0 || after.ssd_bytes() == 0) {
      return named("ssd_bytes", absl::FailedPreconditionError("a change from or to 0 needs a restart of the daemon"));
    }
    if (absl::Status able = ssd_->CheckBudget(id, after.ssd_bytes()); !able.ok()) return named("ssd_bytes", able);
  }
  return absl::OkStatus();
}

void TierSet::SetBudgets(const v1::Config& now, const v1::Config& next) {
  for (int i = 0; i < next.tenants_size(); ++i) {
    const v1::Tenant &before = now.tenants(i), &after = next.tenants(i);
    const auto id = static_cast<TenantId>(i);
    if (before.dram_bytes() != after.dram_bytes()) dram_->SetBudget(id, after.dram_bytes());
    for (const auto& hbm : hbm_) {
      if (before.hbm_bytes() != after.hbm_bytes()) hbm->SetBudget(id, after.hbm_bytes());
    }
    if (before.ssd_bytes() != after.ssd_bytes() && ssd_ != nullptr) ssd_->SetBudget(id, after.ssd_bytes());
  }
}

bool TierSet::StopDisk(std::chrono::nanoseconds patience) {
  if (arenas_ != nullptr) arenas_->Stop();
  if (io_ == nullptr || io_->StopWithin(patience)) return true;
  Log(LogLevel::kError, "the disk hangs; the daemon stops without waiting for its disk threads",
      {{"thread", kDiskThread}, {"stuck", io_->running()}, {"seconds", io_->LongestRun() / kSecond}});
  return false;
}

void TierSet::CloseDisk() {
  records_ = nullptr;
  file_ = nullptr;
}

}  // namespace ashlar::daemon
