// SPDX-License-Identifier: Apache-2.0
#include "storage/cache.h"

#include <algorithm>
#include <map>
#include <utility>

#include "storage/lookup/explainer.h"
#include "storage/lookup/lease.h"
#include "storage/lookup/matcher.h"
#include "storage/lookup/search.h"
#include "storage/objects/object_offers.h"
#include "storage/session_transfers.h"
#include "storage/transfer/composer.h"
#include "storage/transfer/lander.h"
#include "storage/transfer/publisher.h"

namespace ashlar::storage {
namespace {

uint64_t LargestCapacity(const Tiers& tiers, TenantId tenant) {
  uint64_t bytes = tiers.ssd == nullptr ? 0 : tiers.ssd->Usage(tenant).capacity_bytes;
  for (const Tier* tier : tiers.memory) bytes = std::max(bytes, tier->Usage(tenant).capacity_bytes);
  return bytes;
}

// Returns whether the states of this object came from a composition.
bool IsComposed(const ObjectTable::Result& found) {
  return found.object && (found.object->header.kind == ObjectKind::kSegment ||
                          found.object->header.provenance == Provenance::kComposed);
}

}  // namespace

struct Cache::Impl {
  Impl(CacheOptions options, const Tiers& tiers, Mover& mover, Executor& copying, const Clock& clock,
       Observer* observer)
      : clock(clock),
        sessions(tiers.common),
        byte_rates(clock),
        observer(observer == nullptr ? ignored : *observer),
        table(options.objects, tiers, copying, clock, this->observer),
        offers(table, clock),
        explainer(table, clock, options.texts_per_tenant, options.misses_per_tenant),
        leases(std::move(options.random),
               {options.unused_lease, options.leases_per_session, options.leased_segments_per_session,
                options.leases_per_tenant, options.leased_segments_per_tenant}),
        publisher(table, mover, clock, transfers, byte_rates, options.reservation,
                  [this](SessionId session) { return sessions.Level(session); }),
        prefixes(
            table, publisher, transfers, clock, this->observer,
            [this](SessionId session) { return sessions.Has(session); },
            [tiers](TenantId tenant) { return LargestCapacity(tiers, tenant); }),
        matcher(
            table, prefixes, leases, explainer, clock, this->observer,
            [this](SessionId session) { return sessions.Has(session); },
            [this](SessionId session) { return sessions.Level(session); }),
        lander(table, mover, clock, transfers, in_flight, byte_rates, options.landings_per_session, this->observer),
        composer(table, mover, transfers, clock, in_flight, options.compositions_per_session, this->observer),
        upkeep(table, prefixes, explainer, tiers, copying, clock) {}

  const TenantId* Tenant(SessionId session) const { return sessions.Tenant(session); }

  std::unique_ptr<Search> StartLookup(SessionId session, std::span<const Query> queries, const PrefixText* prompt,
                                      HasRoom has_room, const LeaseId& lease) {
    const TenantId* tenant = Tenant(session);
    if (tenant != nullptr) table.reuse().Tick(*tenant);
    return std::make_unique<Search>(
        matcher, session, tenant == nullptr ? std::nullopt : std::optional(*tenant), queries, prompt,
        std::move(has_room), lease,
        draining && !sessions.IsOfNode(session) ? MissReason::kDaemonUnavailable : MissReason::kNone);
  }

  Match Lookup(SessionId session, std::span<const Query> queries, const PrefixText* prompt, const HasRoom& has_room,
               const LeaseId& lease) {
    const auto search = StartLookup(session, queries, prompt, has_room, lease);
    Slice whole;
    search->Run(whole);
    return search->Take();
  }

  // Wraps a landing's `done` and records what it missed.
  std::function<void(std::vector<MissReason>)> Explaining(SessionId session, TenantId tenant, const LeaseId& lease,
                                                          const LandTarget& target,
                                                          std::function<void(std::vector<MissReason>)> done) {
    std::vector<uint32_t> indices;  // index in the match
    for (const LandTarget::Segment& segment : target.segments) indices.push_back(segment.index);
    return [this, session, tenant, lease, indices = std::move(indices),
            done = std::move(done)](std::vector<MissReason> verdict) {
      const LeasedObjects* found = leases.Held(session, lease);  // null: released or lost meanwhile
      for (size_t i = 0; i < verdict.size(); ++i) {
        if (verdict[i] == MissReason::kNone) continue;
        Query query;
        if (found != nullptr && indices[i] < found->size() && (*found)[indices[i]].object) {
          const ObjectHeader& header = (*found)[indices[i]].object->header;
          query = {
              .kind = header.kind, .key = header.key, .shard = header.shard, .ns = header.ns, .tokens = header.tokens};
        }
        explainer.Missed(session, tenant, query, verdict[i]);
      }
      done(std::move(verdict));
    };
  }

  const Clock& clock;
  OpenSessions sessions;
  Rates byte_rates;
  Observer ignored;
  Observer& observer;
  SessionTransfers transfers;
  struct Closing {
    TenantId tenant = 0;
    Freed freed;
  };
  std::map<SessionId, Closing> closing;
  ObjectTable table;  // declared before all members that hold references
  ObjectOffers offers;
  Explainer explainer;
  LeaseTable leases;
  Publisher publisher;
  Prefixes prefixes;
  Matcher matcher;
  InFlight in_flight;
  Lander lander;
  Composer composer;
  Upkeep upkeep;
  bool draining = false;
};

Cache::Cache(CacheOptions options, const Tiers& tiers, Mover& mover, Executor& copying, const Clock& clock,
             Observer* observer)
    : impl_(std::make_unique<Impl>(std::move(options), tiers, mover, copying, clock, observer)) {}

Cache::~Cache() {
  impl_->table.Close();
}

void Cache::SetFloor(size_t tier, const TenantPool& pool, uint64_t bytes) {
  impl_->table.levels()[tier].SetFloor(pool, bytes);
}

void Cache::SetInFlight(TenantId tenant, const InFlight::Bounds& bounds) {
  impl_->in_flight.SetBounds(tenant, bounds);
}

Rates& Cache::byte_rates() {
  return impl_->byte_rates;
}

const Rates& Cache::byte_rates() const {
  return impl_->byte_rates;
}

void Cache::SetTimeToLive(TenantId tenant, Nanos ttl) {
  impl_->table.SetTimeToLive(tenant, ttl);
}

void Cache::SetLeaseBounds(TenantId tenant, size_t leases, size_t segments) {
  impl_->leases.SetTenantBounds(tenant, leases, segments);
}

void Cache::SetPrefixCapacity(TenantId tenant, uint64_t bytes) {
  impl_->prefixes.SetCapacity(tenant, bytes);
}

void Cache::Adopt(std::vector<SsdTier::Recovered> objects, bool more) {
  impl_->upkeep.set_adopting(more);
  for (SsdTier::Recovered& object : objects) {
    impl_->prefixes.Adopt(object.tenant, object.header);
    impl_->table.Adopt({object.tenant, object.pool}, std::move(object.header), std::move(object.slot));
  }
}

bool Cache::AdoptRemote(const TenantPool& pool, ObjectHeader header, RemoteCopyId copy, Nanos cost) {
  const ObjectHeader known = header;
  if (!impl_->table.AdoptRemote(pool, std::move(header), copy, cost)) return false;
  impl_->prefixes.AdoptRemote(pool.tenant, known);
  return true;
}

void Cache::SettleRemote(TenantId tenant, const Key& key, const TensorShard& shard) {
  impl_->table.SettleRemote(tenant, key, shard);
}

bool Cache::TellAll(Telling& telling, Slice& slice) {
  return impl_->table.TellAll(telling, slice);
}

bool Cache::Knows(TenantId tenant, const Key& key) const {
  return !impl_->table.index().keys().All(tenant, key).empty();
}

void Cache::OpenSession(SessionId session, TenantId tenant, SessionOf whose) {
  impl_->sessions.Open(session, tenant, whose);
}

void Cache::SetLevel(SessionId session, size_t level) {
  impl_->sessions.SetLevel(session, level);
}

std::optional<Cache::Freed> Cache::CloseSession(SessionId session, const std::function<void()>& drained, Slice& slice) {
  if (const std::optional<TenantId> tenant = impl_->sessions.Close(session)) {
    impl_->closing[session] = {*tenant, {.leases = impl_->leases.Count(session)}};
    impl_->lander.CloseSession(session);
    impl_->composer.CloseSession(session);
  }
  const auto closing = impl_->closing.find(session);
  Freed freed;
  if (closing != impl_->closing.end()) {
    auto& [tenant, so_far] = closing->second;
    if (!impl_->publisher.CloseSession(session, slice, so_far.reservations) ||
        !impl_->leases.ReleaseAll(session, slice) || !impl_->leases.Settle(tenant, slice)) {
      return std::nullopt;
    }
    freed = so_far;
    impl_->closing.erase(closing);
  }
  impl_->transfers.WhenIdle(session, drained);
  return freed;
}

Match Cache::Lookup(SessionId session, std::span<const Query> queries, const HasRoom& has_room, const LeaseId& lease) {
  return impl_->Lookup(session, queries, nullptr, has_room, lease);
}

Match Cache::Lookup(SessionId session, std::span<const Query> queries, const PrefixText& prompt,
                    const HasRoom& has_room, const LeaseId& lease) {
  return impl_->Lookup(session, queries, &prompt, has_room, lease);
}

std::unique_ptr<Search> Cache::StartLookup(SessionId session, std::span<const Query> queries, const PrefixText* prompt,
                                           HasRoom has_room, const LeaseId& lease) {
  return impl_->StartLookup(session, queries, prompt, std::move(has_room), lease);
}

void Cache::Commit(SessionId session, PrefixCommit commit, std::function<void(std::vector<CommitOutcome>)> done) {
  const TenantId* tenant = impl_->Tenant(session);
  const size_t checkpoints = commit.checkpoints.size();
  if (tenant == nullptr || impl_->draining) {
    return done(std::vector<CommitOutcome>(checkpoints, CommitOutcome::kUnavailable));
  }
  const bool vouched = commit.lease == LeaseId{} ||
                       (impl_->leases.Held(session, commit.lease) != nullptr && !impl_->leases.Composed(commit.lease));
  if (commit.provenance == Provenance::kExact && !vouched) {
    return done(std::vector<CommitOutcome>(checkpoints, CommitOutcome::kBadSource));
  }
  impl_->prefixes.Commit(session, *tenant, std::move(commit), std::move(done));
}

absl::StatusOr<Match> Cache::Attach(SessionId session, const LeaseId& lease, const std::optional<TensorShard>& shard) {
  const TenantId* tenant = impl_->Tenant(session);
  if (tenant == nullptr) return absl::NotFoundError("lease: unknown or expired");
  return impl_->matcher.Attach(session, *tenant, lease, shard);
}

absl::StatusOr<Match> Cache::Held(SessionId session, const LeaseId& lease) const {
  const LeasedObjects* segments = impl_->leases.Held(session, lease);
  if (segments == nullptr) return absl::NotFoundError("lease: unknown or expired");
  return impl_->matcher.Describe(lease, *segments);
}

bool Cache::Holds(SessionId session, const LeaseId& lease) const {
  return impl_->leases.Held(session, lease) != nullptr;
}

void Cache::Release(SessionId session, const LeaseId& lease) {
  Slice whole;
  EndLease(session, lease);
  SettleLeases(session, whole);
}

void Cache::EndLease(SessionId session, const LeaseId& lease) {
  impl_->leases.Release(session, lease);
}

bool Cache::SettleLeases(SessionId session, Slice& slice) {
  const TenantId* tenant = impl_->Tenant(session);
  return tenant == nullptr || impl_->leases.Settle(*tenant, slice);
}

Cache::Reservation Cache::Reserve(SessionId session, const ObjectHeader& plan, const TextDigest& text, PoolKind pool,
                                  Nanos recompute, double flops) {
  const TenantId* tenant = impl_->Tenant(session);
  if (tenant == nullptr || impl_->draining) return {};
  Publisher::Reserved reserved = impl_->publisher.Reserve(session, {*tenant, pool}, plan, recompute, flops);
  const bool present = reserved.outcome == ReserveOutcome::kAlreadyPresent;
  if (present && !impl_->matcher.IsWhole(session, *tenant, {.key = plan.key, .shard = plan.shard})) {
    reserved = impl_->publisher.Reserve(session, {*tenant, pool}, plan, recompute, flops);
  }
  const bool known = text != TextDigest{};
  if (known && reserved.outcome == ReserveOutcome::kGranted) impl_->explainer.Published(*tenant, text, plan.ns);
  return {reserved.outcome, reserved.id};
}

const ObjectHeader* Cache::Planned(SessionId session, ReservationId reservation) const {
  return impl_->publisher.Planned(session, reservation);
}

bool Cache::WhenLoaded(SessionId session, const LeaseId& lease, size_t index, uint64_t extents,
                       std::function<void(bool whole)> call) {
  const LeasedObjects* const objects = impl_->leases.Held(session, lease);
  if (objects == nullptr || index >= objects->size() || !(*objects)[index].object) return false;
  impl_->leases.Use(lease);
  const ObjectTable::Reference& object = (*objects)[index].object;
  const auto held = std::make_shared<const ObjectTable::Reference>(object.Share());
  impl_->table.WhenLoaded(object, extents * limits::kExtentBytes, [held, extents, call = std::move(call)] {
    call((*held)->gone == MissReason::kNone && held->copy().loaded >= extents);
  });
  return true;
}

void Cache::Publish(SessionId session, ReservationId reservation, PublishSource source,
                    std::function<void(PublishOutcome)> done) {
  impl_->publisher.Publish(session, reservation, std::move(source), /*renews=*/true, std::move(done));
}

void Cache::Abandon(SessionId session, ReservationId reservation) {
  impl_->publisher.Abandon(session, reservation);
}

void Cache::Land(SessionId session, LandingId landing, const LeaseId& lease, LandTarget target,
                 LandCallbacks callbacks) {
  const TenantId* tenant = impl_->Tenant(session);
  if (tenant != nullptr) {
    callbacks.done = impl_->Explaining(session, *tenant, lease, target, std::move(callbacks.done));
  }
  const LeasedObjects* found = tenant == nullptr ? nullptr : impl_->leases.Held(session, lease);
  if (found == nullptr) {
    const size_t segments = target.segments.size();
    for (size_t i = 0; tenant != nullptr && i < segments; ++i) {
      impl_->observer.Miss(*tenant, ObjectKind::kSegment, MissReason::kLeaseLost, 0);
    }
    return callbacks.done(std::vector<MissReason>(segments, MissReason::kLeaseLost));
  }
  const bool composed = std::ranges::any_of(target.segments, [found](const LandTarget::Segment& segment) {
    return segment.index < found->size() && IsComposed((*found)[segment.index]);
  });
  impl_->leases.Use(lease, composed);
  if (const MatchedPrefix* const prefix = impl_->leases.Prefix(lease)) {
    for (LandTarget::Segment& segment : target.segments) {
      segment.tokens = std::min(segment.tokens, prefix->RowsOf(segment.index));
    }
  }
  impl_->lander.Land(session, *tenant, landing, *found, impl_->leases.Verified(lease), std::move(target),
                     std::move(callbacks));
}

void Cache::Compose(SessionId session, LandingId number, const LeaseId& lease, Composition composition,
                    std::function<void(CompositionVerdict)> done) {
  const TenantId* tenant = impl_->Tenant(session);
  const LeasedObjects* found = tenant == nullptr ? nullptr : impl_->leases.Held(session, lease);
  if (tenant == nullptr || (found == nullptr && lease != LeaseId{})) {
    const std::vector<MissReason> lost(composition.interiors.size(), MissReason::kLeaseLost);
    if (tenant != nullptr) impl_->observer.Composed(*tenant, MissReason::kLeaseLost, 0);
    return done({MissReason::kLeaseLost, lost});
  }
  if (found == nullptr) {
    const VerifiedLayers nothing(0);
    return impl_->composer.Compose(session, *tenant, number, {}, nothing, std::move(composition), std::move(done));
  }
  const bool composed = std::ranges::any_of(composition.interiors, [found](const Composition::Interior& interior) {
    return interior.segment < found->size() && IsComposed((*found)[interior.segment]);
  });
  impl_->leases.Use(lease, composed);
  impl_->composer.Compose(session, *tenant, number, *found, *impl_->leases.Verified(lease), std::move(composition),
                          std::move(done));
}

void Cache::Quiesce(SessionId session, LandingId landing, std::function<void()> quiet) {
  impl_->lander.Quiesce(session, landing, [this, session, landing, quiet = std::move(quiet)] {
    impl_->composer.Quiesce(session, landing, quiet);
  });
}

std::vector<Explanation> Cache::Explain(TenantId tenant, std::span<const Query> queries) const {
  std::vector<Explanation> explanations;
  for (const Query& query : queries) explanations.push_back(impl_->explainer.Explain(tenant, query));
  return explanations;
}

std::vector<Miss> Cache::LastMisses(TenantId tenant, size_t most) const {
  return impl_->explainer.LastMisses(tenant, most);
}

bool Cache::Pin(TenantId tenant, const Key& key, Nanos until) {
  return impl_->table.Pin(tenant, key, until);
}

bool Cache::Unpin(TenantId tenant, const Key& key) {
  return impl_->table.Unpin(tenant, key);
}

bool Cache::Evict(TenantId tenant, const Key& key) {
  return impl_->table.Evict(tenant, key);
}

std::vector<TierKind> Cache::Where(TenantId tenant, const Key& key, const TensorShard& shard) const {
  return impl_->table.levels().TiersOf(impl_->table.index().keys().Find(tenant, key, shard));
}

Upkeep& Cache::upkeep() {
  return impl_->upkeep;
}

const Upkeep& Cache::upkeep() const {
  return impl_->upkeep;
}

void Cache::StartDrain() {
  impl_->draining = true;
  impl_->offers.Flush();
}

void Cache::EndDrain() {
  impl_->draining = false;
  impl_->offers.EndFlush();
}

Offers& Cache::offers() {
  return impl_->offers;
}

const Prefixes& Cache::prefixes() const {
  return impl_->prefixes;
}

bool Cache::draining() const {
  return impl_->draining;
}

bool Cache::Tick(Slice& slice) {
  if (!impl_->leases.Expire(impl_->clock.Now(), slice) || !impl_->leases.SettleAll(slice) ||
      !impl_->publisher.Expire(slice)) {
    return false;
  }
  return impl_->table.Tick(slice);
}

Cache::Stats Cache::stats() const {
  return {.objects = impl_->table.objects(),
          .object_bytes = impl_->table.object_bytes(),
          .leases = impl_->leases.size(),
          .reservations = impl_->publisher.reservations(),
          .landings = impl_->lander.landings(),
          .compositions = impl_->composer.compositions(),
          .copies_under_way = impl_->table.placement().copies_under_way(),
          .unsaved = impl_->table.placement().unsaved(),
          .pools = impl_->table.levels().pools()};
}

Prefixes::Stats Cache::prefix_stats(TenantId tenant) const {
  return impl_->prefixes.stats(tenant);
}

}  // namespace ashlar::storage
