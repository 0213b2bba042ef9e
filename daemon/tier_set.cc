#include "daemon/tier_set.h"

#include <sys/random.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/log.h"

namespace ashlar::daemon {
namespace {

using storage::TenantId;

constexpr storage::Nanos kSecond = 1'000'000'000;

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

void LogRecovery(const std::string& folder, const storage::SsdTier::RecoveryReport& report, double seconds) {
  Log(LogLevel::kInfo, "disk read",
      {{"folder", folder},
       {"objects", report.objects},
       {"bytes", report.bytes},
       {"damaged", report.damaged},
       {"superseded", report.superseded},
       {"over_budget", report.over_budget},
       {"milliseconds", static_cast<uint64_t>(1e3 * seconds)}});
  for (const auto& [tenant, bytes] : report.unknown_tenants) {
    Log(LogLevel::kWarning, "the disk has objects of a tenant that is not configured",
        {{"tenant", tenant}, {"bytes", bytes}});
  }
}

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
  if (absl::Status status = set->OpenDisk(config, loop); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat("ssd.folder ", config.ssd().folder(), ": ", status.message()));
  }
  return set;
}

absl::Status TierSet::OpenDisk(const v1::Config& config, EventLoop& loop) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string& folder = config.ssd().folder();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot make ", folder));
  auto file = storage::OpenBlockFile(folder + "/slab", storage::SsdTier::SlabBytes(config.ssd().capacity_bytes()));
  if (!file.ok()) return file.status();
  file_ = *std::move(file);
  auto records = storage::OpenRecordStore(folder + "/records");
  if (!records.ok()) return records.status();
  records_ = *std::move(records);
  io_ = std::make_unique<WorkerPool>(static_cast<int>(config.ssd().threads()), config.ssd().queue_depth(), loop);
  storage::SsdTierOptions options;
  if (getrandom(options.new_id.data(), options.new_id.size(), 0) != static_cast<ssize_t>(options.new_id.size())) {
    return absl::ErrnoToStatus(errno, "getrandom");
  }
  auto ssd = storage::SsdTier::Open(options, *file_, *records_, *io_);
  if (!ssd.ok()) return ssd.status();
  ssd_ = *std::move(ssd);
  for (int i = 0; i < config.tenants_size(); ++i) {
    const v1::Tenant& tenant = config.tenants(i);
    if (tenant.ssd_bytes() == 0) continue;
    absl::Status added = ssd_->AddTenant(static_cast<TenantId>(i), tenant.name(), tenant.ssd_bytes());
    if (!added.ok()) return added;
  }
  auto recovered = ssd_->Recover();
  if (!recovered.ok()) return recovered.status();
  recovered_ = *std::move(recovered);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  LogRecovery(folder, ssd_->recovery(), took.count());
  return absl::OkStatus();
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
    if (tenant.ttl_seconds() > 0) cache.SetTimeToLive(id, static_cast<storage::Nanos>(tenant.ttl_seconds()) * kSecond);
  }
  cache.Adopt(std::move(recovered_));
}

void TierSet::StopDisk() {
  if (io_ != nullptr) io_->Stop();
}

}  // namespace ashlar::daemon
