// SPDX-License-Identifier: Apache-2.0
// A cache with everything around it in a test's hands.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "proto/limits.h"
#include "storage/cache.h"
#include "storage/testing/engine.h"
#include "storage/testing/executors.h"
#include "storage/testing/manual_clock.h"
#include "storage/tier/memory_tier.h"
#include "storage/transfer/mover.h"

namespace ashlar::storage {

// Counts the cache's reports.
struct CountingObserver final : Observer {
  void Hit(TenantId, ObjectKind, TierKind, uint64_t) override { ++hits; }
  void Miss(TenantId, ObjectKind, MissReason reason, uint64_t) override { misses.push_back(reason); }
  void Evicted(TenantId, ObjectKind, const Ghost& ghost) override {
    evicted.push_back(ghost.reason);
    ghosts.push_back(ghost);
  }
  void Published(TenantId, ObjectKind, uint64_t bytes) override { published_bytes += bytes; }
  void Landed(TenantId, uint64_t bytes) override { landed_bytes += bytes; }

  void Copied(TenantId, TierKind from, TierKind to, uint64_t bytes) override {
    copied.emplace_back(from, to);
    if (to == TierKind::kSsd) bytes_to_disk += bytes;
  }
  void Prefetched(TenantId, bool in_time) override { prefetched.push_back(in_time); }
  void TierError(TenantId, TierKind tier, const absl::Status&) override { tier_errors.push_back(tier); }
  void NoMemory(TenantId, absl::string_view) override { ++memory_refusals; }

  int hits = 0, memory_refusals = 0;
  std::vector<MissReason> misses, evicted;
  std::vector<Ghost> ghosts;  // ghosts of evicted objects
  std::vector<std::pair<TierKind, TierKind>> copied;
  std::vector<TierKind> tier_errors;
  std::vector<bool> prefetched;
  uint64_t published_bytes = 0, landed_bytes = 0, bytes_to_disk = 0;
};

inline std::unique_ptr<MemoryTier> TestTier(std::vector<std::pair<TenantId, uint64_t>> budgets_in_extents,
                                            TierKind kind = TierKind::kDram) {
  uint64_t capacity = 0;
  for (const auto& [tenant, extents] : budgets_in_extents) capacity += extents * limits::kExtentBytes;
  auto tier = *MemoryTier::Make({.kind = kind, .capacity_bytes = capacity, .arena_bytes = 8 * limits::kExtentBytes});
  for (const auto& [tenant, extents] : budgets_in_extents) {
    if (!tier->AddTenant(tenant, extents * limits::kExtentBytes).ok()) std::abort();
  }
  return tier;
}

// Tenants 1 and 2. The test decides when work runs (`executor`).
struct Rig {
  explicit Rig(uint64_t extents = 64, CacheOptions options = {})
      : tier(TestTier({{1, extents}, {2, extents}})),
        cache(options, {.memory = {tier.get()}}, mover, executor, clock, &observer) {}

  Query Ask(const ObjectHeader& plan) const {
    return {.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens};
  }

  Match Lookup(SessionId session, const ObjectHeader& plan) {
    const Query query = Ask(plan);
    return cache.Lookup(session, {&query, 1});
  }
  MissReason Reason(SessionId session, const ObjectHeader& plan) {  // looks up and releases
    const Match match = Lookup(session, plan);
    cache.Release(session, match.lease);
    return match.found[0].reason;
  }

  // Starts a publish. The result holds the outcome once the executor has run.
  std::shared_ptr<std::optional<PublishOutcome>> StartPublish(SessionId session, ReservationId reservation,
                                                              PublishSource source) {
    auto outcome = std::make_shared<std::optional<PublishOutcome>>();
    cache.Publish(session, reservation, std::move(source), [outcome](PublishOutcome o) { *outcome = o; });
    return outcome;
  }

  // Reserves and publishes text number `text` at once.
  bool Publish(SessionId session, const ObjectHeader& plan, uint64_t text) {
    const Cache::Reservation reservation = cache.Reserve(session, plan);
    if (reservation.outcome != ReserveOutcome::kGranted) return false;
    const auto outcome = StartPublish(session, reservation.id, TestSource(plan, text));
    executor.CompleteAll();
    return *outcome == PublishOutcome::kPublished;
  }

  struct Landing {
    uint32_t layers = 0;
    std::optional<std::vector<MissReason>> verdict;
  };
  std::shared_ptr<Landing> StartLanding(SessionId session, LandingId id, const LeaseId& lease, LandTarget target) {
    auto landing = std::make_shared<Landing>();
    cache.Land(session, id, lease, std::move(target),
               {.progress = [landing](uint32_t layers) { landing->layers = layers; },
                .done = [landing](std::vector<MissReason> verdict) { landing->verdict = std::move(verdict); }});
    return landing;
  }

  ManualClock clock;
  ManualExecutor executor;
  InlineWorkers workers;
  CountingObserver observer;
  std::unique_ptr<MemoryTier> tier;
  Mover mover{kernels::Reference(), workers, executor, *tier, /*turn_bytes=*/1};  // one executor item per layer
  Cache cache;
};

// Flips one bit of an object's header in place.
inline void CorruptHeader(const Tier& tier, const Slot& slot, uint64_t offset) {
  tier.Address(slot.runs[0].arena, slot.runs[0].first)[offset] ^= std::byte{1};
}

// Flips one bit of an object's part in place.
inline void Corrupt(const Tier& tier, const Slot& slot, const ObjectHeader& header, uint32_t layer, PartForm form) {
  const Part& part = *header.Find(layer, form);
  const uint64_t offset = part.UnitOffset(part.units - 1) + part.last_unit_bytes - 1;
  uint64_t extent = offset / limits::kExtentBytes;
  for (const ExtentRun& run : slot.runs) {
    if (extent < run.count) {
      tier.Address(run.arena, run.first + static_cast<uint32_t>(extent))[offset % limits::kExtentBytes] ^= std::byte{1};
      return;
    }
    extent -= run.count;
  }
}

}  // namespace ashlar::storage
