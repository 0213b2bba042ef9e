// SPDX-License-Identifier: Apache-2.0
// Reloader: takes over a changed configuration while the daemon runs, all of it or nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/admin/audit_log.h"
#include "daemon/config/reload.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/session/session_protocol.h"
#include "daemon/tiers/tier_set.h"
#include "storage/cache.h"

namespace ashlar::daemon {

class Metrics;

// Any thread but the loop's.
class Reloader {
 public:
  // All must outlive it. `file` empty: there is nothing to read again.
  Reloader(const v1::Config& config, std::string file, EventLoop& loop, TierSet& tiers, storage::Cache& cache,
           SessionServices& services, storage::Rates& call_rates, Metrics& metrics, AuditLog& audit);
  ~Reloader();

  // Reads the file and returns what has changed. FAILED_PRECONDITION names fields that a running daemon cannot change,
  // or not to this value now; INVALID_ARGUMENT a field that makes no sense; then nothing has changed. The metrics are
  // told how it ended, but of a dry run. The thread that calls leaves the audit log's line of it.
  absl::StatusOr<std::vector<ConfigChange>> Reload(bool dry_run);

  std::string config() const;  // in effect, as YAML
  uint32_t drain_seconds() const { return drain_seconds_; }

 private:
  absl::StatusOr<std::vector<ConfigChange>> TryReload(bool dry_run);  // with mutex_
  // On the loop: the tiers' part. Nothing happens where it is refused, or `dry_run`.
  absl::Status TakeOver(const v1::Config& next, bool dry_run);

  const std::string file_;
  EventLoop& loop_;
  TierSet& tiers_;
  storage::Cache& cache_;
  SessionServices& services_;
  storage::Rates& call_rates_;
  Metrics& metrics_;
  AuditLog& audit_;
  mutable std::mutex mutex_;
  std::unique_ptr<v1::Config> now_;  // guarded by mutex_
  std::atomic<uint32_t> drain_seconds_;
};

}  // namespace ashlar::daemon
