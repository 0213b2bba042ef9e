// SPDX-License-Identifier: Apache-2.0
// TieredRig: a cache of three tiers, with everything around it in a test's hands: two memory tiers over a simulated
// disk.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "proto/limits.h"
#include "storage/cache.h"
#include "storage/testing/rig.h"
#include "storage/testing/simulated_disk.h"
#include "storage/tier/ssd_tier.h"
#include "storage/transfer/mover.h"

namespace ashlar::storage {

struct TieredOptions {
  // extents of each of the tenants 1 and 2; 0: no hbm or ssd tier
  uint64_t hbm = 8, dram = 16, ssd = 64;
  AdmissionMode admission = AdmissionMode::kAll;
  CacheOptions cache;
  uint64_t seed = 1;
  RemoteSource* remote = nullptr;
};

class TieredRig {
 public:
  explicit TieredRig(const TieredOptions& options)
      : options_(options), disk(SsdTier::SlabBytes(2 * options.ssd * limits::kExtentBytes), options.seed) {
    if (options.hbm > 0) hbm = TestTier({{1, options.hbm}, {2, options.hbm}}, TierKind::kHbm);
    Start();
  }

  // Restarts as after a kill: memory is lost, and the objects on the disk are recovered.
  void Restart() {
    cache.reset();
    ssd.reset();
    io.Kill();
    executor.Kill();
    if (hbm != nullptr) hbm = TestTier({{1, options_.hbm}, {2, options_.hbm}}, TierKind::kHbm);
    disk.Restart();
    Start();
  }

  // Runs everything that waits for an executor, in turns.
  void Settle() {
    while (io.pending() + executor.pending() > 0) {
      executor.CompleteAll();
      io.CompleteAll();
    }
  }

  // Waits until a degraded disk has been tried again.
  void LetDiskRecover() {
    clock.Advance(2'000'000'000);
    cache->Tick();
    Settle();
  }

  // StallDisk: an operation of the disk does not return, and the cache has detected it. The next function lets it
  // return.
  void StallDisk() {
    io.set_longest_run(SsdHealth::kDeadline);
    cache->Tick();
    executor.CompleteAll();
  }
  void EndStall() {
    io.set_longest_run(0);
    Settle();
    cache->Tick();
    Settle();
  }

  Match Lookup(SessionId session, const ObjectHeader& plan) {
    const Query query{.kind = plan.kind, .key = plan.key, .shard = plan.shard, .tokens = plan.tokens};
    return cache->Lookup(session, {&query, 1});
  }

  bool Publish(SessionId session, const ObjectHeader& plan, uint64_t text) {
    const Cache::Reservation reservation = cache->Reserve(session, plan);
    if (reservation.outcome != ReserveOutcome::kGranted) return false;
    std::optional<PublishOutcome> outcome;
    cache->Publish(session, reservation.id, TestSource(plan, text), [&](PublishOutcome o) { outcome = o; });
    while (!outcome) executor.Complete(0);
    return *outcome == PublishOutcome::kPublished;
  }

  std::shared_ptr<Rig::Landing> StartLanding(SessionId session, LandingId id, const LeaseId& lease, LandTarget target) {
    auto landing = std::make_shared<Rig::Landing>();
    cache->Land(session, id, lease, std::move(target),
                {.progress = [landing](uint32_t layers) { landing->layers = layers; },
                 .done = [landing](std::vector<MissReason> verdict) { landing->verdict = std::move(verdict); }});
    return landing;
  }

 private:
  void Start() {
    dram = TestTier({{1, options_.dram}, {2, options_.dram}});
    if (options_.ssd > 0) ssd = *SsdTier::Open({}, disk.file(), disk.records(), io);
    for (const TenantId tenant : {1, 2}) {
      const uint64_t budget = options_.ssd * limits::kExtentBytes;
      if (ssd != nullptr && !ssd->AddTenant(tenant, names[tenant - 1], budget).ok()) abort();
    }
    Tiers tiers{.ssd = ssd.get(), .remote = options_.remote};
    if (hbm != nullptr) tiers.memory.push_back(hbm.get());
    tiers.memory.push_back(dram.get());
    mover.emplace(kernels::Reference(), workers, executor, *tiers.memory.front(), /*turn_bytes=*/1);
    CacheOptions options = options_.cache;
    options.objects.admission = options_.admission;
    std::vector<SsdTier::Recovered> recovered;
    if (ssd != nullptr) recovered = *ssd->Recover();
    cache.emplace(options, tiers, *mover, executor, clock, &observer);
    cache->adoption().Adopt(std::move(recovered));
  }

  const TieredOptions options_;

 public:
  SimulatedDisk disk;
  ManualClock clock;
  ManualExecutor executor, io;
  InlineWorkers workers;
  CountingObserver observer;
  std::unique_ptr<MemoryTier> hbm, dram;
  std::unique_ptr<SsdTier> ssd;
  std::array<std::string, 2> names = {"tenant1", "tenant2"};  // names for the next start
  std::optional<Mover> mover;
  std::optional<Cache> cache;
};

}  // namespace ashlar::storage
