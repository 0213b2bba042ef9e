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
constexpr int kSlowestRetry = 5;  // seconds between attempts to open the disk
constexpr size_t kAdoptedAtOnce = 1024;

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

storage::ArenaOptions ArenasFrom(const v1::Dram& dram, const kernels::Gpu* gpu) {
  storage::ArenaOptions options{.huge_pages = dram.huge_pages(), .lock = dram.lock(), .gpu = gpu};
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
                                                       const kernels::Gpu* gpu) {
  std::unique_ptr<TierSet> set(new TierSet());
  if (config.hbm().capacity_bytes() > 0) {
    auto hbm = MakeMemory(config,
                          {.kind = TierKind::kHbm,
                           .capacity_bytes = config.hbm().capacity_bytes(),
                           .arena_bytes = config.hbm().arena_bytes(),
                           .arena = {.gpu = gpu},
                           .on_gpu = gpu != nullptr},
                          &v1::Tenant::hbm_bytes);
    if (!hbm.ok()) return hbm.status();
    set->hbm_ = *std::move(hbm);
    if (gpu == nullptr) Log(LogLevel::kWarning, "the hbm tier lies in the processor's memory: no GPU is configured");
  }
  auto dram = MakeMemory(config,
                         {.kind = TierKind::kDram,
                          .capacity_bytes = config.dram().capacity_bytes(),
                          .arena_bytes = config.dram().arena_bytes(),
                          .arena = ArenasFrom(config.dram(), gpu)},
                         &v1::Tenant::dram_bytes);
  if (!dram.ok()) return dram.status();
  set->dram_ = *std::move(dram);
  if (config.ssd().folder().empty()) return set;
  if (absl::Status status = set->OpenDisk(config, loop); !status.ok()) return status;
  return set;
}

absl::Status TierSet::OpenDisk(const v1::Config& config, EventLoop& loop) {
  loop_ = &loop;
  io_ = std::make_unique<WorkerPool>(static_cast<int>(config.ssd().threads()), config.ssd().queue_depth(), loop);
  absl::StatusOr<SsdDisk> disk = OpenSsdDisk(config, *io_);
  if (disk.ok()) {
    file_ = std::move(disk->file);
    records_ = std::move(disk->records);
    ssd_ = std::move(disk->tier);
    recovered_ = std::move(disk->recovered);
    set_aside_ += disk->set_aside ? 1 : 0;
    return absl::OkStatus();
  }
  if (!storage::MayPass(disk.status())) return disk.status();
  auto tier = storage::SsdTier::WithoutDisk({}, config.ssd().capacity_bytes(), *io_, disk.status());
  if (!tier.ok()) return tier.status();
  ssd_ = *std::move(tier);
  open_ = [config, io = io_.get()] { return OpenSsdDisk(config, *io); };
  return AddSsdTenants(config, *ssd_);
}

void TierSet::Tick(storage::Cache& cache) {
  if (open_ == nullptr || opening_ || --ticks_left_ > 0) return;
  auto opened = std::make_shared<absl::StatusOr<SsdDisk>>();
  opening_ = io_->Run(
      storage::kNoTenant, [opened, open = open_] { *opened = open(); },
      [this, opened, &cache] { Attach(std::move(*opened), cache); });
}

void TierSet::Attach(absl::StatusOr<SsdDisk> opened, storage::Cache& cache) {
  opening_ = false;
  patience_ = std::min(2 * patience_, kSlowestRetry);
  ticks_left_ = patience_;
  if (!opened.ok()) return ssd_->StillWithoutDisk(opened.status());
  open_ = nullptr;
  file_ = std::move(opened->file);
  records_ = std::move(opened->records);
  set_aside_ += opened->set_aside ? 1 : 0;
  ssd_->Attach(std::move(opened->tier));
  // A million objects would hold engines up for a second.
  auto recovered = std::make_shared<std::vector<storage::SsdTier::Recovered>>(std::move(opened->recovered));
  for (size_t first = 0; first < recovered->size(); first += kAdoptedAtOnce) {
    loop_->PostCompletion(storage::kNoTenant, [recovered, first, &cache] {
      const auto begin = recovered->begin() + static_cast<ptrdiff_t>(first);
      const size_t count = std::min(kAdoptedAtOnce, recovered->size() - first);
      cache.Adopt({std::make_move_iterator(begin), std::make_move_iterator(begin + static_cast<ptrdiff_t>(count))});
    });
  }
}

storage::Tiers TierSet::tiers() const {
  storage::Tiers tiers{.ssd = ssd_.get()};
  if (hbm_ != nullptr) tiers.memory.push_back(hbm_.get());
  tiers.memory.push_back(dram_.get());
  return tiers;
}

void TierSet::Configure(const v1::Config& config, storage::Cache& cache) {
  for (int i = 0; i < config.tenants_size(); ++i) {
    const v1::Tenant& tenant = config.tenants(i);
    const auto id = static_cast<TenantId>(i);
    for (const PoolFloor& pool : {PoolFloor{storage::PoolKind::kPublic, &tenant.public_floor()},
                                  PoolFloor{storage::PoolKind::kPrivate, &tenant.private_floor()}}) {
      size_t tier = 0;
      if (hbm_ != nullptr) cache.SetFloor(tier++, {id, pool.kind}, pool.floor->hbm_bytes());
      cache.SetFloor(tier++, {id, pool.kind}, pool.floor->dram_bytes());
      if (ssd_ != nullptr) cache.SetFloor(tier, {id, pool.kind}, pool.floor->ssd_bytes());
    }
    cache.SetPrefixCapacity(id, tenant.prefix_bytes());
    cache.SetInFlight(id, {.calls = tenant.max_landings(), .bytes = tenant.landing_bytes()});
    cache.SetLeaseBounds(id, tenant.max_leases(), tenant.max_leased_segments());
    cache.SetTimeToLive(id, static_cast<storage::Nanos>(tenant.ttl_seconds()) * kSecond);
  }
  cache.Adopt(std::move(recovered_));
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
    if (before.hbm_bytes() != after.hbm_bytes() && hbm_ != nullptr) {
      if (absl::Status able = hbm_->CheckBudget(id, after.hbm_bytes()); !able.ok()) return named("hbm_bytes", able);
    }
    if (before.ssd_bytes() == after.ssd_bytes() || ssd_ == nullptr) continue;
    if (before.ssd_bytes() == 0 || after.ssd_bytes() == 0) {
      return named("ssd_bytes", absl::FailedPreconditionError("from or to 0 needs a restart of the daemon"));
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
    if (before.hbm_bytes() != after.hbm_bytes() && hbm_ != nullptr) hbm_->SetBudget(id, after.hbm_bytes());
    if (before.ssd_bytes() != after.ssd_bytes() && ssd_ != nullptr) ssd_->SetBudget(id, after.ssd_bytes());
  }
}

void TierSet::StopDisk() {
  if (io_ != nullptr) io_->Stop();
}

}  // namespace ashlar::daemon
