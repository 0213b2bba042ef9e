// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/node.h"

#include <algorithm>
#include <cstdlib>

#include "kernels/kernels.h"

namespace ashlar::simulation::nodes {

using storage::Slot;

LentTier::~LentTier() {
  for (const auto& [extent, tenant] : lent_) {
    memory_.Free({.tenant = tenant, .runs = {{extent.first, extent.second, 1}}});
  }
}

storage::TierUsage LentTier::Usage(TenantId tenant) const {
  storage::TierUsage usage = memory_.Usage(tenant);
  usage.capacity_bytes = bytes_;
  return usage;
}

absl::StatusOr<Slot> LentTier::Allocate(TenantId tenant, uint64_t extents) {
  if (bug_ == Bug::kSharesExtents && last_ && last_->tenant == tenant && last_->Extents() >= extents &&
      schedule_.Chance(25)) {
    Slot again = *last_;
    (void)again.SplitAfter(extents);
    for (const storage::ExtentRun& run : again.runs) {
      for (uint32_t i = 0; i < run.count; ++i) ++shared_[{run.arena, run.first + i}];
    }
    return again;
  }
  if (memory_.Usage(tenant).used_bytes + extents * limits::kExtentBytes > bytes_) {
    return absl::ResourceExhaustedError("the tenant's budget");
  }
  absl::StatusOr<Slot> slot = memory_.Allocate(tenant, extents);
  if (!slot.ok()) return slot;
  last_ = *slot;
  for (const storage::ExtentRun& run : slot->runs) {
    for (uint32_t i = 0; i < run.count; ++i) lent_[{run.arena, run.first + i}] = tenant;
  }
  return slot;
}

void LentTier::Free(Slot slot) {
  Slot own{.tenant = slot.tenant};
  for (const storage::ExtentRun& run : slot.runs) {
    for (uint32_t i = 0; i < run.count; ++i) {
      const auto shared = shared_.find({run.arena, run.first + i});
      if (shared != shared_.end() && shared->second > 0) {
        --shared->second;  // its other owner will free it
      } else {
        own.runs.push_back({run.arena, run.first + i, 1});
        lent_.erase({run.arena, run.first + i});
      }
    }
  }
  memory_.Free(shared_.empty() ? std::move(slot) : std::move(own));
}

bool Workers::Run(TenantId tenant, std::function<void()> work, std::function<void()> done) {
  if (pending_.size() >= kCapacity) return false;
  const auto item = std::make_shared<Item>(Item{tenant, std::move(work), std::move(done)});
  pending_.insert(item);
  const Nanos takes = schedule_.Chance(5) ? schedule_.DrawTime(50 * kMillisecond) : schedule_.DrawTime(kMillisecond);
  schedule_.For(life_, takes, [this, item] {
    if (pending_.contains(item)) Do(item);
  });
  return true;
}

void Workers::Do(const std::shared_ptr<Item>& item) {
  item->work();
  pending_.erase(item);
  loop_.PostCompletion(item->tenant, std::move(item->done));
  posted_();
}

void Workers::RunAll() {
  while (!pending_.empty()) {
    const std::shared_ptr<Item> item = *std::ranges::min_element(pending_, {}, &Item::tenant);
    Do(item);
  }
}

const std::vector<std::string>& Node::Tenants() {
  static const auto* const names = new std::vector<std::string>{"none", "tenant1", "tenant2"};
  return *names;
}

daemon::PeersOptions Node::Options() const {
  daemon::PeersOptions options;
  options.self = Calls::NameOf(machine_);
  options.announce = around.announce;
  return options;
}

storage::CacheOptions Node::CacheOptions() {
  storage::CacheOptions options{.random = [this] { return around.schedule.Random(); }};
  options.objects.residence = peers.residence();
  return options;
}

std::unique_ptr<daemon::Transport> Node::MakeTransport() {
  daemon::TransportSurroundings surroundings{
      .now = [this] { return clock.Now(); },
      .random = [this] { return around.schedule.Random(); },
      .open = [this](const daemon::TransportOptions&,
                     daemon::LinkEvents events) -> absl::StatusOr<std::unique_ptr<daemon::Ucx>> {
        return std::make_unique<SimulatedUcx>(around.fabric, machine_, life_, around.order, std::move(events),
                                              [this] { WakeTransport(); });
      }};
  auto made = daemon::Transport::Start({}, std::move(surroundings), [this] { WakeTransport(); });
  if (!made.ok()) std::abort();
  return *std::move(made);
}

daemon::EtcdDirectoryOptions Node::DirectoryOptions() const {
  daemon::EtcdDirectoryOptions options;
  options.endpoints = {"etcd:2379"};
  options.lease_seconds = around.lease_seconds;
  return options;
}

daemon::DirectoryEvents Node::Events() {
  return {.members_changed =
              [this] {
                // On another loop, which makes connections.
                around.schedule.For(life_, around.schedule.DrawTime(5 * kMillisecond), [this] { MembersChanged(); });
              },
          .announce_again =
              [this] {
                loop.PostCompletion(storage::kNoTenant, [this] { peers.AnnounceAgain(); });
                Pump();
              },
          .health_changed = nullptr};
}

void Node::MembersChanged() {
  calls.Update(directory->Members());
  Pump();
}

Node::Node(Surroundings& its_around, size_t machine, const MachineClock& its_clock, storage::MemoryTier& memory,
           uint64_t extents, uint64_t incarnation)
    : around(its_around),
      machine_(machine),
      clock(its_clock),
      loop(1024, its_clock, Tenants().size()),
      tier(memory, extents, its_around.bug, its_around.schedule),
      workers(its_around.schedule, life_, loop, [this] { Pump(); }),
      calls(its_around.calls, machine, life_, its_clock, Tenants(),
            [this](const daemon::Member& member) {
              loop.PostCompletion(storage::kNoTenant, [this, member] { peers.Lost(member); });
              Pump();
            }),
      transport(MakeTransport()),
      directory(its_around.network, its_around.etcd, machine, life_, its_clock, DirectoryOptions(), Events(),
                incarnation, [this] { Pump(); }),
      peers(loop, its_clock, Tenants(), *directory, *transport, calls, calls, Options()),
      mover(kernels::Host(), threads, workers, tier, /*turn_bytes=*/1) {
  cache.emplace(CacheOptions(), storage::Tiers{.memory = {&tier}, .remote = &peers.source()}, mover, workers, clock,
                &observer);
  router.emplace(clock, *cache, daemon::Router::Options{});
  peers.Start(*cache, {&tier});
  peers.Route(*router);
  for (storage::SessionId session = 1; session <= kSessions; ++session) {
    cache->OpenSession(session, TenantOf(session));
    directory->Follow(Plans().at({TenantOf(session), 1}).ns);
  }
  const bool drops = around.bug == Bug::kDropsDeadlines;
  if (!drops) loop.Every(around.flush_every, [this] { peers.Flush(); });
  if (!drops) loop.Every(around.flush_every, [this] { router->Tick(); });
  loop.Every(kSecond, [this] {
    if (around.bug != Bug::kKeepsPeersGone && around.bug != Bug::kDropsDeadlines) peers.Tick();
    cache->Tick();
  });
  calls.Serve(peers);
  Pump();
}

Node::~Node() {
  // From now on nothing arrives. Work in progress ends as in a daemon that leaves.
  life_->ended = true;
  held.clear();
  calls.End();
  router->Stop();
  const auto run = [this] {
    while (workers.pending() > 0 || loop.depth() > 0) {
      workers.RunAll();
      while (loop.RunNext()) {
      }
    }
  };
  run();
  peers.EndOffers();
  while (!peers.Stop()) {
    while (transport->Turn()) {
    }
    run();
  }
  for (storage::SessionId session = 1; session <= kSessions; ++session) cache->CloseSession(session, [] {});
  run();
  transport = nullptr;
  run();
  directory.End();
  cache->Tick();
  run();
}

void Node::Post(TenantId tenant, std::function<void()> closure) {
  loop.PostCompletion(tenant, std::move(closure));
  Pump();
}

void Node::Pump() {
  if (life_->ended || std::exchange(loop_pumps_, true)) return;
  ++loop_due_;
  around.schedule.For(life_, around.schedule.DrawTime(20 * kMicrosecond), [this] { PumpLoop(); });
}

void Node::PumpLoop() {
  loop_pumps_ = false;
  const bool some = loop.RunNext();
  if (some || loop.depth() > 0) return Pump();
  const uint64_t due = ++loop_due_;
  const Nanos wait = clock.Until(loop.due_at());
  if (wait == INT64_MAX) return;
  around.schedule.For(life_, wait, [this, due] {
    if (due == loop_due_) Pump();
  });
}

void Node::WakeTransport() {
  if (life_->ended || std::exchange(transport_pumps_, true)) return;
  ++transport_due_;
  around.schedule.For(life_, around.schedule.DrawTime(20 * kMicrosecond), [this] { PumpTransport(); });
}

void Node::PumpTransport() {
  transport_pumps_ = false;
  const bool some = transport->Turn();
  Pump();
  if (some) return WakeTransport();
  const uint64_t due = ++transport_due_;
  const Nanos wait = clock.Until(transport->due());
  if (wait == INT64_MAX) return;
  around.schedule.For(life_, std::max(wait, kMillisecond), [this, due] {
    if (due == transport_due_) WakeTransport();
  });
}

void Node::Drain() {
  Post(storage::kNoTenant, [this] {
    cache->offers().StartDrain();
    peers.SetDraining(true);
    drains_ = true;
  });
}

}  // namespace ashlar::simulation::nodes
