// SPDX-License-Identifier: Apache-2.0
// Replicas: offers copies of objects that several nodes have requested from this node to nodes with free space.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/peer/directory/directory.h"
#include "daemon/peer/offers/offerer.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// A node that requests an object keeps a copy. If several nodes request an object within the window, others will too:
// it is offered to one node without it, and to another after each further requesting node. A fetch of an offered object
// does not count as a request. Replicas only use free space, and are evicted like other objects. The metadata thread
// only.
class Replicas {
 public:
  struct Options {
    uint64_t bytes_per_second = uint64_t{64} << 20;  // offered; 0: off
    uint32_t askers = 2;                             // distinct nodes
    storage::Nanos window = 60'000'000'000;
    size_t objects = 16384;  // objects with counters
    size_t waiting = 1024;   // queued offers
    uint32_t patience_ms = 10'000;
    // Time before a node is asked again: after it had no space, refused a tenant or did not answer; and after it was
    // busy.
    storage::Nanos pause = 10'000'000'000, busy_pause = 50'000'000;
  };

  // All must outlive the object.
  Replicas(const storage::Clock& clock, const Directory& directory, Offerer& offerer, storage::Cache& cache,
           const Options& options)
      : clock_(clock), directory_(directory), offerer_(offerer), cache_(cache), options_(options) {}

  // A node was given an object. `node` is its name.
  void Asked(const std::string& node, storage::TenantId tenant, const Key& key);
  // Call it many times per second.
  void Tick();
  size_t counted() const { return demand_.size(); }

 private:
  using Place = std::pair<storage::TenantId, Key>;
  struct Demand {
    std::map<std::string, storage::Nanos> askers;  // last request of each node; few entries
    storage::Nanos asked_at = 0;                   // last request of any node
    bool waits = false;
  };
  struct Copy {
    storage::Offering offering;
    storage::Nanos marked_at = 0;  // when its receiver was counted as a requester; 0 if not
  };
  static Place PlaceOf(const storage::Offering& offering) { return {offering.pool.tenant, offering.key}; }
  void Wait(const Place& place);
  void Erase(storage::Nanos now);
  bool Paused(const Member& member, storage::TenantId tenant) const;
  void Pause(const Member& member, storage::TenantId tenant, storage::Nanos time);
  bool Wants(const Member& member, const storage::Offering& offering) const;
  std::optional<std::shared_ptr<const Member>> NodeFor(const storage::Offering& offering);
  std::optional<storage::Offering> Next();
  void Offer(const std::shared_ptr<const Member>& to, std::vector<storage::Offering> offerings);
  void Answered(const std::shared_ptr<const Member>& to, const std::vector<Copy>& copies,
                const absl::StatusOr<std::vector<TakeOutcome>>& reply);

  static constexpr size_t kMostAskers = 16;
  static constexpr size_t kMostPaused = 4096;
  static constexpr size_t kTries = 16;  // offers tried per Tick

  const storage::Clock& clock_;
  const Directory& directory_;
  Offerer& offerer_;
  storage::Cache& cache_;
  const Options options_;
  std::map<Place, Demand> demand_;
  std::deque<Place> waiting_;
  // Key: incarnation of the member, tenant; kNoTenant for all tenants.
  std::map<std::pair<uint64_t, storage::TenantId>, storage::Nanos> not_before_;
  std::map<uint64_t, storage::Nanos> busy_until_;  // key: incarnation of the member
  double allowance_ = 0;                           // bytes that may be offered now
  storage::Nanos allowed_at_ = 0, erased_at_ = 0;
  uint64_t turn_ = 0;
};

}  // namespace ashlar::daemon
