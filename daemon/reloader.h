// SPDX-License-Identifier: Apache-2.0
// Reloader: applies a changed configuration to the running daemon, completely or not at all.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/admin/audit_log.h"
#include "daemon/config/reload.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/session/session_protocol.h"
#include "daemon/tiers/tier_set.h"
#include "kernels/mutex.h"
#include "storage/cache.h"

namespace ashlar::daemon {

class Metrics;

// Any thread except the loop's.
class Reloader {
 public:
  // All must outlive the object. With an empty `file`, Reload fails.
  Reloader(const v1::Config& config, std::string file, EventLoop& loop, TierSet& tiers, storage::Cache& cache,
           SessionServices& services, storage::Rates& call_rates, Metrics& metrics, AuditLog& audit);
  ~Reloader();

  // Reads the file and returns the changes. On an error nothing changes: FAILED_PRECONDITION names fields that need a
  // restart or cannot have this value now, INVALID_ARGUMENT an invalid field. The metrics record the result, except of
  // a dry run. The caller writes the line in the audit log.
  absl::StatusOr<std::vector<ConfigChange>> Reload(bool dry_run);

  std::string config() const;  // effective configuration as YAML
  uint32_t drain_seconds() const { return drain_seconds_; }

 private:
  absl::StatusOr<std::vector<ConfigChange>> TryReload(bool dry_run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(reloading_);
  v1::Config Now() const;
  // Applies changes of tiers. Runs on the loop. Changes nothing if refused, or with `dry_run`.
  absl::Status Adopt(const v1::Config& now, const v1::Config& next, bool dry_run);

  const std::string file_;
  EventLoop& loop_;
  TierSet& tiers_;
  storage::Cache& cache_;
  SessionServices& services_;
  storage::Rates& call_rates_;
  Metrics& metrics_;
  AuditLog& audit_;
  Mutex reloading_;  // held while files are read, which a disk that hangs delays
  mutable Mutex mutex_ ABSL_ACQUIRED_AFTER(reloading_);
  std::unique_ptr<v1::Config> now_ ABSL_GUARDED_BY(mutex_);  // TryReload alone changes it
  std::atomic<uint32_t> drain_seconds_;
};

}  // namespace ashlar::daemon
