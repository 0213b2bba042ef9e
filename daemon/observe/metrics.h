// SPDX-License-Identifier: Apache-2.0
// Metrics: the daemon's Prometheus metrics. docs/metrics.md lists them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/observe/call_metrics.h"
#include "daemon/observe/cluster_metrics.h"
#include "daemon/observe/holdings.h"
#include "daemon/observe/metrics_text.h"
#include "daemon/observe/router_metrics.h"
#include "daemon/observe/status_board.h"
#include "daemon/observe/tallies.h"
#include "daemon/runtime/event_loop.h"
#include "daemon/runtime/refused_connections.h"
#include "storage/objects/level.h"
#include "storage/observer.h"
#include "storage/prefix/prefixes.h"
#include "storage/sharing/page_pool.h"
#include "storage/upkeep/scrubber.h"

namespace ashlar::daemon {

// A snapshot of levels, taken periodically by the metadata thread.
struct Levels {
  std::map<TierKind, std::vector<storage::TierUsage>> tiers;  // existing tiers; the vector index is the TenantId
  storage::PoolShares pools;
  std::map<TierKind, std::string> degraded;  // tiers that take no writes, with the reason
  uint64_t quarantined = 0;                  // damaged record databases that were renamed, since the start
  uint64_t disk_queue = 0, copies_under_way = 0;
  uint64_t objects = 0, object_bytes = 0, leases = 0, reservations = 0, landings = 0, compositions = 0;
  uint64_t sessions = 0;
  bool draining = false, writing_behind = false;
  uint64_t memory_only_objects = 0, memory_only_bytes = 0;              // objects in memory only
  std::vector<Holdings> holdings;                                       // index is the TenantId
  std::vector<storage::PagePool::Levels> pages;                         // index is the TenantId
  std::vector<storage::Prefixes::Stats> prefixes;                       // index is the TenantId
  uint64_t metadata_queue = 0, worker_queue = 0;                        // queued tasks and jobs
  uint64_t metadata_queue_rejections = 0, worker_queue_rejections = 0;  // since the start
  uint64_t log_lines_dropped = 0, log_lines_suppressed = 0;             // since the start
  storage::Scrubber::Totals scrub;
  ClusterFigures cluster;
  RouterFigures router;
  // by socket and reason, since the start
  std::map<std::pair<std::string, RefusedConnection>, uint64_t> refused_connections;

  uint64_t admissions() const;  // sum over all tenants
  // Returns whether a drain is complete.
  bool drained() const;
};

class Metrics final : public storage::Observer {
 public:
  // Names of the tenants; the index is the TenantId.
  explicit Metrics(const std::vector<std::string>& tenants);
  ~Metrics() override;

  // The metadata thread only.
  void Hit(storage::TenantId, ObjectKind, TierKind, uint64_t tokens) override;
  void Miss(storage::TenantId, ObjectKind, MissReason, uint64_t tokens) override;
  void Evicted(storage::TenantId, ObjectKind, const storage::Ghost& ghost) override;
  void Published(storage::TenantId, ObjectKind, uint64_t bytes) override;
  void Landed(storage::TenantId, uint64_t bytes) override;
  void Copied(storage::TenantId, TierKind from, TierKind to, uint64_t bytes) override;
  void TierError(storage::TenantId, TierKind tier, const absl::Status& error) override;
  void NoMemory(storage::TenantId, absl::string_view why) override;
  void Prefetched(storage::TenantId tenant, bool in_time) override;
  void Reserved(storage::TenantId, ObjectKind, ReserveOutcome) override;
  void Prompted(storage::TenantId, uint64_t tokens) override;
  void Resumed(storage::TenantId, bool own, uint64_t tokens, uint64_t prompt) override;
  void Saved(storage::TenantId, double seconds) override;
  void Committed(storage::TenantId, CommitOutcome, bool own, uint64_t depth) override;
  void Composed(storage::TenantId, MissReason outcome, storage::Nanos elapsed) override;
  void Set(const Levels& levels);
  void TurnsTaken(const EventLoop::TurnTimes& times);  // times of turns since the last call; the metadata thread only
  const Tallies& tallies(storage::TenantId tenant) const;

  // Any thread.
  void Reloaded(bool accepted);  // result of a reload, not of a dry run
  std::string Text(TenantLabel label) const;
  const StatusBoard& board() const;
  CallMetrics& calls();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::daemon
