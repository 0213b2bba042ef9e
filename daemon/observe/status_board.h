// SPDX-License-Identifier: Apache-2.0
// StatusBoard: shows the state of a node on one HTML page (route / of listen.metrics_address). The page names no
// tenant, because anyone who reaches the address can read it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "daemon/observe/tallies.h"
#include "kernels/mutex.h"
#include "proto/key.h"
#include "proto/outcome.h"

namespace ashlar::daemon {

struct Levels;

// A snapshot over all tenants.
struct StatusView {
  static constexpr size_t kMisses = 12;  // misses shown
  using Clock = std::chrono::steady_clock;
  struct Tier {
    std::string name;
    uint64_t used_bytes = 0, held_bytes = 0, capacity_bytes = 0;
    std::string degraded;  // why the tier takes no writes; empty if it does
  };
  struct Pool {
    std::string name;
    uint64_t used_bytes = 0, floor_bytes = 0, capacity_bytes = 0;  // capacity is that of the tier
  };
  struct Miss {
    ObjectKind kind = ObjectKind::kSegment;
    MissReason reason = MissReason::kNone;
    uint64_t tokens = 0;
    Clock::time_point at;
  };
  struct Peers {
    uint64_t members = 0, connected = 0, directory_entries = 0, fetched_bytes = 0;
    bool directory_connected = false;
  };
  bool draining = false, rdma_fallback = false;
  std::vector<Tier> tiers;             // fastest first
  std::vector<Pool> pools;             // fastest first
  std::deque<Miss> misses;             // newest first
  uint64_t pages = 0, free_pages = 0;  // pages that the daemon allocates for engines
  Tallies tallies;                     // since the daemon started
  uint64_t objects = 0, object_bytes = 0, sessions = 0, leases = 0, landings = 0;
  uint64_t memory_only_bytes = 0, disk_queue = 0;
  Peers peers;
};

StatusView ViewOf(const Levels& levels, const std::vector<Tallies>& tallies);
// Returns the page. It has one style, no script and no external resources.
std::string StatusPage(const StatusView& view, StatusView::Clock::time_point now = StatusView::Clock::now());

class StatusBoard {
 public:
  // One thread only. The miss is shown in the next view.
  void Missed(ObjectKind kind, MissReason reason, uint64_t tokens);
  void Set(StatusView view);

  std::string Page() const;  // any thread

 private:
  std::deque<StatusView::Miss> misses_;  // newest first
  mutable Mutex mutex_;
  StatusView view_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ashlar::daemon
