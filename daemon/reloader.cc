// SPDX-License-Identifier: Apache-2.0
#include "daemon/reloader.h"

#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/config.pb.h"
#include "daemon/config/config.h"
#include "daemon/from_config.h"
#include "daemon/mappings.h"
#include "daemon/observe/metrics.h"
#include "daemon/open_files.h"
#include "daemon/runtime/log.h"

namespace ashlar::daemon {

Reloader::Reloader(const v1::Config& config, std::string file, EventLoop& loop, TierSet& tiers, storage::Cache& cache,
                   SessionServices& services, storage::Rates& call_rates, Metrics& metrics, AuditLog& audit)
    : file_(std::move(file)),
      loop_(loop),
      tiers_(tiers),
      cache_(cache),
      services_(services),
      call_rates_(call_rates),
      metrics_(metrics),
      audit_(audit),
      now_(std::make_unique<v1::Config>(config)),
      drain_seconds_(config.drain_seconds()) {}

Reloader::~Reloader() = default;

std::string Reloader::config() const {
  return FormatConfig(Now());
}

v1::Config Reloader::Now() const {
  MutexLock lock(mutex_);
  return *now_;
}

absl::Status Reloader::Adopt(const v1::Config& now, const v1::Config& next, bool dry_run) {
  std::promise<absl::Status> taken;
  const bool posted = loop_.Post(storage::kNoTenant, [&] {
    const absl::Status able = tiers_.CheckBudgets(now, next);
    if (able.ok() && !dry_run) {
      tiers_.SetBudgets(now, next);
      tiers_.Configure(next, cache_);
      cache_.upkeep().scrubber().SetRate(next.scrub().bytes_per_second());
    }
    taken.set_value(able);
  });
  if (!posted) return absl::ResourceExhaustedError("the daemon's metadata queue is full; try again");
  return taken.get_future().get();
}

absl::StatusOr<std::vector<ConfigChange>> Reloader::Reload(bool dry_run) {
  MutexLock lock(reloading_);
  absl::StatusOr<std::vector<ConfigChange>> changes = TryReload(dry_run);
  if (!dry_run) metrics_.Reloaded(changes.ok());
  return changes;
}

absl::StatusOr<std::vector<ConfigChange>> Reloader::TryReload(bool dry_run) {
  if (file_.empty())
    return absl::FailedPreconditionError(
        "the daemon was started without a configuration file; restart it with --config");
  const v1::Config now = Now();
  v1::Config next;
  if (absl::Status read = LoadConfig(file_, &next); !read.ok()) return read;
  absl::StatusOr<std::vector<ConfigChange>> changes = ChangesFor(now, next);
  if (!changes.ok()) return changes;
  // Checks the machine's limits again before anything changes.
  if (absl::Status able = CheckMappings(next); !able.ok()) return able;
  if (!dry_run) {
    if (absl::Status able = RaiseOpenFilesLimit(next); !able.ok()) return able;
  }
  absl::StatusOr<AuditLog::File> audit_file = AuditLog::OpenFile(next.log().audit_file());
  if (!audit_file.ok()) return audit_file.status();
  if (absl::Status taken = Adopt(now, next, dry_run); !taken.ok()) return taken;
  if (dry_run) return changes;
  for (const auto& [uid, user] : services_.tenant_of_uid) {
    const v1::Tenant& tenant = next.tenants(static_cast<int>(user.id));
    user.regions.bytes->set_limit(tenant.region_bytes());
    user.regions.number->set_limit(tenant.max_regions());
    user.models->set_limit(tenant.model_bytes());
  }
  SetCallRates(next, &call_rates_);
  drain_seconds_ = next.drain_seconds();
  SetLogLevel(next.log().level());
  if (next.log().audit_file() == now.log().audit_file()) {
    audit_.Use(*std::move(audit_file));
  } else {
    audit_.MoveTo(*std::move(audit_file));
  }
  {
    MutexLock lock(mutex_);
    *now_ = next;
  }
  for (const ConfigChange& change : *changes) {
    Log(LogLevel::kInfo, "configuration reloaded",
        {{"field", change.field}, {"before", change.before}, {"after", change.after}});
  }
  return changes;
}

}  // namespace ashlar::daemon
