// SPDX-License-Identifier: Apache-2.0
#include "storage/cache.h"

#include <algorithm>
#include <map>
#include <utility>

#include "storage/lookup/matcher.h"
#include "storage/lookup/prober.h"
#include "storage/lookup/search.h"
#include "storage/objects/object_finder.h"
#include "storage/objects/object_offers.h"
#include "storage/objects/object_writer.h"
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
bool IsComposed(const FoundObject& found) {
  return found.object && (found.object->header.kind == ObjectKind::kSegment ||
                          found.object->header.provenance == Provenance::kComposed);
}

}  // namespace

struct Cache::Impl {
  Impl(CacheOptions options, const Tiers& tiers, Mover& mover, Executor& copying, const Clock& its_clock,
       Observer* its_observer)
      : clock(its_clock),
        common(tiers.common),
        sessions(tiers.common),
        byte_rates(clock),
        observer(its_observer == nullptr ? ignored : *its_observer),
        table(options.objects, tiers, copying, clock, observer),
        finder(table, clock),
        writer(table, clock),
        retention(table),
        offers(table, clock),
        explainer(table, clock, options.texts_per_tenant, options.misses_per_tenant),
        leases(std::move(options.random),
               {options.unused_lease, options.leases_per_session, options.leased_segments_per_session,
                options.leases_per_tenant, options.leased_segments_per_tenant}),
        publisher(writer, mover, clock, transfers, byte_rates, options.reservation,
                  [this](SessionId session) { return sessions.Level(session); }),
        prefixes(
            table, publisher, transfers, copying, clock, observer,
            [this](SessionId session) { return sessions.Has(session); },
            [tiers](TenantId tenant) { return LargestCapacity(tiers, tenant); }),
        matcher(
            table, finder, prefixes, leases, explainer, clock, observer,
            [this](SessionId session) { return sessions.Has(session); },
            [this](SessionId session) { return sessions.Level(session); }),
        lander(table, mover, clock, transfers, in_flight, byte_rates, options.landings_per_session, observer),
        composer(table, mover, transfers, clock, in_flight, options.compositions_per_session, observer),
        adoption(table, prefixes),
        upkeep(table, prefixes, explainer, adoption, tiers, copying, clock) {}

  const TenantId* Tenant(SessionId session) const { return sessions.Tenant(session); }

  std::unique_ptr<Search> StartLookup(SessionId session, std::span<const Query> queries, const PrefixText* prompt,
                                      HasSpace has_space, const LeaseId& lease) {
    const TenantId* tenant = Tenant(session);
    if (tenant != nullptr) table.reuse().Tick(*tenant);
    return std::make_unique<Search>(
        matcher, session, tenant == nullptr ? std::nullopt : std::optional(*tenant), queries, prompt,
        std::move(has_space), lease,
        offers.draining() && !sessions.IsOfNode(session) ? MissReason::kDaemonUnavailable : MissReason::kNone);
  }

  Match Lookup(SessionId session, std::span<const Query> queries, const PrefixText* prompt, const HasSpace& has_space,
               const LeaseId& lease) {
    const auto search = StartLookup(session, queries, prompt, has_space, lease);
    Slice whole;
    search->Run(whole);
    return search->Take();
  }

  // Wraps a landing's `done` to record its misses.
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
  const size_t common;
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
  ObjectFinder finder;
  ObjectWriter writer;
  Retention retention;
  ObjectOffers offers;
  Explainer explainer;
  LeaseTable leases;
  Publisher publisher;
  Prefixes prefixes;
  Matcher matcher;
  InFlight in_flight;
  Lander lander;
  Composer composer;
  Adoption adoption;
  Upkeep upkeep;
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

void Cache::SetBounds(TenantId tenant, const TenantBounds& bounds) {
  if (bounds.in_flight) impl_->in_flight.SetBounds(tenant, *bounds.in_flight);
  if (bounds.prefix_bytes) impl_->prefixes.SetCapacity(tenant, *bounds.prefix_bytes);
  if (bounds.leases) impl_->leases.SetTenantBounds(tenant, bounds.leases->leases, bounds.leases->segments);
}

Rates& Cache::byte_rates() {
  return impl_->byte_rates;
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

Match Cache::Lookup(SessionId session, std::span<const Query> queries, const HasSpace& has_space,
                    const LeaseId& lease) {
  return impl_->Lookup(session, queries, nullptr, has_space, lease);
}

Match Cache::Lookup(SessionId session, std::span<const Query> queries, const PrefixText& prompt,
                    const HasSpace& has_space, const LeaseId& lease) {
  return impl_->Lookup(session, queries, &prompt, has_space, lease);
}

std::unique_ptr<Search> Cache::StartLookup(SessionId session, std::span<const Query> queries, const PrefixText* prompt,
                                           HasSpace has_space, const LeaseId& lease) {
  return impl_->StartLookup(session, queries, prompt, std::move(has_space), lease);
}

std::unique_ptr<Prober> Cache::StartProbe(TenantId tenant, std::span<const Query> queries, const PrefixText* prompt,
                                          uint64_t head, uint64_t tail) {
  return std::make_unique<Prober>(impl_->table, impl_->finder, impl_->prefixes, impl_->clock, tenant, impl_->common,
                                  queries, prompt, head, tail, impl_->offers.draining());
}

void Cache::Commit(SessionId session, PrefixCommit commit, std::function<void(std::vector<CommitOutcome>)> done) {
  const TenantId* tenant = impl_->Tenant(session);
  const size_t checkpoints = commit.checkpoints.size();
  if (tenant == nullptr || impl_->offers.draining()) {
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
  if (tenant == nullptr || impl_->offers.draining()) return {};
  Publisher::Reserved reserved = impl_->publisher.Reserve(session, {*tenant, pool}, plan, recompute, flops);
  const bool present = reserved.outcome == ReserveOutcome::kAlreadyPresent;
  if (present && !impl_->matcher.IsWhole(session, *tenant, {.key = plan.key, .shard = plan.shard})) {
    reserved = impl_->publisher.Reserve(session, {*tenant, pool}, plan, recompute, flops);
  }
  const bool known = text != TextDigest{};
  if (known && reserved.outcome == ReserveOutcome::kGranted) impl_->explainer.Published(*tenant, text, plan.ns);
  return {reserved.outcome, reserved.id};
}

bool Cache::WhenGrown(SessionId session, const ObjectHeader& plan, std::function<void(bool grown)> call) {
  const TenantId* tenant = impl_->Tenant(session);
  if (tenant == nullptr || impl_->offers.draining()) return false;
  return impl_->publisher.WhenGrown(session, *tenant, plan.Extents(), std::move(call));
}

const ObjectHeader* Cache::Planned(SessionId session, ReservationId reservation) const {
  return impl_->publisher.Planned(session, reservation);
}

bool Cache::WhenLoaded(SessionId session, const LeaseId& lease, size_t index, uint64_t extents,
                       std::function<void(bool whole)> call) {
  const LeasedObjects* const objects = impl_->leases.Held(session, lease);
  if (objects == nullptr || index >= objects->size() || !(*objects)[index].object) return false;
  impl_->leases.Use(lease);
  const ObjectReference& object = (*objects)[index].object;
  const auto held = std::make_shared<const ObjectReference>(object.Share());
  object.WhenLoaded(extents * limits::kExtentBytes, [held, extents, call = std::move(call)] {
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

void Cache::Quiesce(SessionId session, LandingId landing, std::function<void()> quiesced) {
  impl_->lander.Quiesce(session, landing, [this, session, landing, quiesced = std::move(quiesced)] {
    impl_->composer.Quiesce(session, landing, quiesced);
  });
}

Adoption& Cache::adoption() {
  return impl_->adoption;
}

Retention& Cache::retention() {
  return impl_->retention;
}

const Residences& Cache::residences() const {
  return impl_->table.residences();
}

const Explainer& Cache::explainer() const {
  return impl_->explainer;
}

Upkeep& Cache::upkeep() {
  return impl_->upkeep;
}

Offers& Cache::offers() {
  return impl_->offers;
}

const Prefixes& Cache::prefixes() const {
  return impl_->prefixes;
}

bool Cache::Tick(Slice& slice) {
  if (!impl_->leases.Expire(impl_->clock.Now(), slice) || !impl_->leases.SettleAll(slice) ||
      !impl_->publisher.Expire(slice) || !impl_->retention.Tick(slice)) {
    return false;
  }
  impl_->table.placement().Tick();
  return true;
}

Cache::Stats Cache::stats() const {
  return {.objects = impl_->table.objects(),
          .object_bytes = impl_->table.object_bytes(),
          .leases = impl_->leases.size(),
          .reservations = impl_->publisher.reservations(),
          .landings = impl_->lander.landings(),
          .compositions = impl_->composer.compositions(),
          .copies_under_way = impl_->table.placement().copies_under_way(),
          .memory_only = impl_->table.placement().memory_only(),
          .pools = impl_->table.levels().pools()};
}

}  // namespace ashlar::storage
