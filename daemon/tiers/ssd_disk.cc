// SPDX-License-Identifier: Apache-2.0
#include "daemon/tiers/ssd_disk.h"

#include <sys/random.h>

#include <cerrno>
#include <chrono>
#include <ctime>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/runtime/log.h"
#include "daemon/tiers/disk_folder.h"

namespace ashlar::daemon {
namespace {

using storage::TenantId;

void LogRecovery(const std::string& folder, const storage::SsdTier::RecoveryReport& report, double seconds) {
  Log(LogLevel::kInfo, "disk index loaded",
      {{"folder", folder},
       {"objects", report.objects},
       {"bytes", report.bytes},
       {"damaged", report.damaged},
       {"superseded", report.superseded},
       {"over_budget", report.over_budget},
       {"milliseconds", static_cast<uint64_t>(1e3 * seconds)}});
  for (const auto& [tenant, bytes] : report.unknown_tenants) {
    Log(LogLevel::kWarning, "the disk holds objects of a tenant that is not in the configuration",
        {{"tenant", tenant}, {"bytes", bytes}});
  }
}

absl::Status Open(const v1::Config& config, storage::Executor& io, SsdDisk* disk) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string& folder = config.ssd().folder();
  const absl::StatusOr<UniqueFd> opened = OpenPrivate(folder);
  if (!opened.ok()) return opened.status();
  auto file = storage::OpenBlockFile(folder + "/slab", storage::SsdTier::SlabBytes(config.ssd().capacity_bytes()),
                                     opened->get());
  if (!file.ok()) return file.status();
  disk->file = *std::move(file);
  auto records = storage::OpenRecordStore(RecordsFolder(folder), [](bool error, std::string_view line) {
    Log(error ? LogLevel::kError : LogLevel::kWarning, "message from RocksDB", {{"text", std::string(line)}});
  });
  if (!records.ok()) return records.status();
  disk->records = *std::move(records);
  storage::SsdTierOptions options;
  if (getrandom(options.new_id.data(), options.new_id.size(), 0) != static_cast<ssize_t>(options.new_id.size())) {
    return absl::ErrnoToStatus(errno, "getrandom");
  }
  auto tier = storage::SsdTier::Open(options, *disk->file, *disk->records, io);
  if (!tier.ok()) return tier.status();
  disk->tier = *std::move(tier);
  if (absl::Status status = AddSsdTenants(config, *disk->tier); !status.ok()) return status;
  auto recovered = disk->tier->Recover();
  if (!recovered.ok()) return recovered.status();
  disk->recovered = *std::move(recovered);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  LogRecovery(folder, disk->tier->recovery(), took.count());
  return absl::OkStatus();
}

absl::Status WithField(const std::string& folder, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("ssd.folder ", folder, ": ", status.message()));
}

}  // namespace

absl::Status AddSsdTenants(const v1::Config& config, storage::SsdTier& tier) {
  for (int i = 0; i < config.tenants_size(); ++i) {
    const v1::Tenant& tenant = config.tenants(i);
    if (tenant.ssd_bytes() == 0) continue;
    absl::Status added = tier.AddTenant(static_cast<TenantId>(i), tenant.name(), tenant.ssd_bytes());
    if (!added.ok()) return added;
  }
  return absl::OkStatus();
}

absl::StatusOr<SsdDisk> OpenSsdDisk(const v1::Config& config, storage::Executor& io) {
  const std::string& folder = config.ssd().folder();
  SsdDisk disk;
  absl::Status status = Open(config, io, &disk);
  if (absl::IsDataLoss(status)) {
    if (config.ssd().on_damage() == "refuse") {
      return WithField(folder,
                       absl::DataLossError(absl::StrCat(status.message(), "; to start empty, rename or remove ",
                                                        RecordsFolder(folder), ", or set ssd.on_damage: quarantine")));
    }
    disk = {};  // closed before it is renamed
    const absl::StatusOr<std::string> name = QuarantineRecords(folder, std::time(nullptr));
    if (!name.ok()) return WithField(folder, name.status());
    Log(LogLevel::kError, "the disk index is damaged; it was renamed, and the tier starts empty",
        {{"folder", folder}, {"error", std::string(status.message())}, {"quarantined", *name}});
    disk.quarantined = true;
    status = Open(config, io, &disk);
  }
  if (!status.ok()) return WithField(folder, status);
  return disk;
}

}  // namespace ashlar::daemon
