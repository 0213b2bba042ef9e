// SPDX-License-Identifier: Apache-2.0
// Node: one daemon's part of a cluster, put together as daemon/peer/cluster.cc does it, with a cache, a router, and
// workers in simulated time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/peer/peers.h"
#include "daemon/router/router.h"
#include "daemon/runtime/event_loop.h"
#include "storage/cache.h"
#include "storage/testing/executors.h"
#include "storage/testing/rig.h"
#include "storage/tier/memory_tier.h"
#include "storage/transfer/mover.h"
#include "tests/simulation/nodes/calls.h"
#include "tests/simulation/nodes/directory_process.h"
#include "tests/simulation/nodes/fabric.h"
#include "tests/simulation/texts.h"

namespace ashlar::simulation::nodes {

// The memory of one node's tier, which outlives the node: creating it again costs more than the rest of a start. It has
// a budget, and tracks allocations.
class LentTier final : public storage::Tier {
 public:
  LentTier(storage::MemoryTier& memory, uint64_t extents, Bug bug, Schedule& schedule)
      : memory_(memory), bytes_(extents * limits::kExtentBytes), bug_(bug), schedule_(schedule) {}
  ~LentTier() override;  // frees all allocations

  TierKind kind() const override { return memory_.kind(); }
  absl::StatusOr<storage::Slot> Allocate(TenantId tenant, uint64_t extents) override;
  void Free(storage::Slot slot) override;
  storage::TierUsage Usage(TenantId tenant) const override;
  storage::TierUsage Usage() const override { return memory_.Usage(); }
  std::byte* Address(uint32_t arena, uint32_t extent) const override { return memory_.Address(arena, extent); }

 private:
  using Extent = std::pair<uint32_t, uint32_t>;

  storage::MemoryTier& memory_;
  const uint64_t bytes_;
  const Bug bug_;
  Schedule& schedule_;
  std::map<Extent, TenantId> lent_;
  std::optional<storage::Slot> last_;  // kSharesExtents: the slot that the next one may get as well
  std::map<Extent, int> shared_;
};

// Workers of a node: work takes some time, and ends on the metadata thread.
class Workers final : public storage::Executor {
 public:
  Workers(Schedule& schedule, const std::shared_ptr<Life>& life, daemon::EventLoop& loop, std::function<void()> posted)
      : schedule_(schedule), life_(life), loop_(loop), posted_(std::move(posted)) {}
  bool Run(TenantId tenant, std::function<void()> work, std::function<void()> done) override;
  void Post(TenantId tenant, std::function<void()> event) override { loop_.PostCompletion(tenant, std::move(event)); }
  bool ShouldYield(TenantId) const override { return schedule_.Chance(25); }
  size_t pending() const { return pending_.size(); }
  void RunAll();  // as at a daemon's end

 private:
  struct Item {
    TenantId tenant;
    std::function<void()> work, done;
  };
  void Do(const std::shared_ptr<Item>& item);

  static constexpr size_t kCapacity = 256;

  Schedule& schedule_;
  const std::shared_ptr<Life> life_;
  daemon::EventLoop& loop_;
  const std::function<void()> posted_;
  std::set<std::shared_ptr<Item>> pending_;
};

// Everything that nodes share.
struct Surroundings {
  Schedule& schedule;
  Network& network;
  Etcd& etcd;
  Fabric& fabric;
  CallSwitch& calls;
  const Bug bug;
  uint32_t lease_seconds = 5;
  Wire::Order order = Wire::Order::kKept;
  Nanos flush_every = 20 * kMillisecond;
  daemon::AnnounceMode announce = daemon::AnnounceMode::kAll;
};

class Node {
 public:
  // Sessions of engines: 1 and 2 make requests, 3 and 4 offer prefill; one of each kind per tenant.
  static constexpr storage::SessionId kSessions = 4;
  static TenantId TenantOf(storage::SessionId session) { return 1 + (session - 1) % kTenants; }
  static const std::vector<std::string>& Tenants();

  // `incarnation`: 0: drawn.
  Node(Surroundings& around, size_t machine, const MachineClock& clock, storage::MemoryTier& memory, uint64_t extents,
       uint64_t incarnation);
  // Ends the node abruptly, as seen from outside: links, leases and etcd see the same as with a killed process.
  ~Node();

  const std::shared_ptr<Life>& life() const { return life_; }
  size_t machine() const { return machine_; }
  // On the metadata thread, soon.
  void Post(TenantId tenant, std::function<void()> closure);
  // Lets it check for work.
  void Pump();
  // It drains, as before its end, and offers its objects to other nodes.
  void Drain();
  bool drained() const { return drains_ && !peers.transferring(); }
  uint64_t incarnation() { return directory->Members().front()->incarnation; }

  Surroundings& around;
  // By the lookups of engines for which it is held: what was found elsewhere.
  std::map<uint64_t, daemon::RemoteLookup::Adopted> held;

 private:
  const size_t machine_;
  const std::shared_ptr<Life> life_ = std::make_shared<Life>();
  bool drains_ = false, loop_pumps_ = false, transport_pumps_ = false;
  uint64_t loop_due_ = 0, transport_due_ = 0;  // a counter: a wait with an older value is void

  void PumpLoop();
  void PumpTransport();
  void WakeTransport();
  std::unique_ptr<daemon::Transport> MakeTransport();
  daemon::DirectoryEvents Events();
  daemon::EtcdDirectoryOptions DirectoryOptions() const;
  void MembersChanged();
  daemon::PeersOptions Options() const;
  storage::CacheOptions CacheOptions();

 public:
  const MachineClock& clock;
  daemon::EventLoop loop;
  LentTier tier;
  Workers workers;
  storage::InlineWorkers threads;
  Calls calls;
  std::unique_ptr<daemon::Transport> transport;
  DirectoryProcess directory;
  storage::CountingObserver observer;
  daemon::Peers peers;
  storage::Mover mover;
  std::optional<storage::Cache> cache;
  std::optional<daemon::Router> router;
};

}  // namespace ashlar::simulation::nodes
