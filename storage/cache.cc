#include "storage/cache.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "storage/composer.h"
#include "storage/drain.h"
#include "storage/explainer.h"
#include "storage/lander.h"
#include "storage/lease.h"
#include "storage/publisher.h"

namespace ashlar::storage {

struct Cache::Impl {
  Impl(CacheOptions options, const Tiers& tiers, Mover& mover, Executor& copying, const Clock& clock,
       Observer* observer)
      : clock(clock),
        top(*tiers.memory.front()),
        observer(observer == nullptr ? ignored : *observer),
        pool(options.pool, tiers, copying, clock, this->observer),
        explainer(pool, clock, options.texts_per_tenant, options.misses_per_tenant),
        leases(std::move(options.random),
               {options.unused_lease, options.leases_per_session, options.leased_segments_per_session}),
        publisher(pool, mover, clock, drain, options.reservation),
        lander(pool, mover, clock, drain, this->observer),
        composer(pool, mover, drain, clock, options.compositions_per_session, this->observer) {}

  const TenantId* Tenant(SessionId session) const {
    const auto found = sessions.find(session);
    return found == sessions.end() ? nullptr : &found->second;
  }

  Found Describe(const Pool::Result& result) const {
    if (!result.object) return {.reason = result.reason};
    if (result.object->gone != MissReason::kNone) return {.reason = result.object->gone};
    return {.tier = result.tier, .header = &result.object->header, .slot = &result.object->top().slot};
  }

  Match Describe(const LeaseId& lease, const LeaseTable::Segments& segments) const {
    Match match{.lease = lease};
    for (const Pool::Result& segment : segments) match.found.push_back(Describe(segment));
    return match;
  }

  using Verified = absl::flat_hash_set<ObjectId>;
  using Others = std::vector<Pool::Reference>;  // shards of what was found

  // Engines read an object's header in place, where it may have changed since it was written: they would miss the
  // object, and never get it published again. One call verifies an object once, however often it asks for it.
  bool HeaderIsWhole(const Entry& object, Verified& verified) const {
    if (!object.top().whole()) return true;  // on its way up: landings will verify it
    if (!verified.insert(object.id).second) return true;
    const ExtentRun& first = object.top().slot.runs.front();
    const auto* bytes = reinterpret_cast<const char*>(top.Address(first.arena, first.first));
    return VerifyHeader({bytes, limits::kExtentBytes}).ok();
  }

  Pool::Result FindWhole(TenantId tenant, const Query& query, Verified& verified, Others& others) {
    const size_t before = others.size();
    Pool::Result result = pool.Find(tenant, query, &others);
    if (!result.object) return result;
    const auto is_whole = [&](const Pool::Reference& object) { return HeaderIsWhole(*object, verified); };
    if (is_whole(result.object) && std::all_of(others.begin() + before, others.end(), is_whole)) return result;
    pool.Drop(result.object, MissReason::kChecksumFailed);
    others.erase(others.begin() + before, others.end());
    return {.reason = MissReason::kChecksumFailed};
  }

  Pool::Result Find(SessionId session, TenantId tenant, const Query& query, Verified& verified, Others& others) {
    if (!query.storable) return Missed(session, tenant, query, MissReason::kTooShort);
    Pool::Result result = FindWhole(tenant, query, verified, others);
    if (!result.object) return Missed(session, tenant, query, result.reason);
    return result;
  }

  // What a lease of one shard is to another one.
  LeaseTable::Segments ForShard(const LeaseTable::Segments& segments, const TensorShard& shard, Others& others) {
    LeaseTable::Segments own;
    own.reserve(segments.size());
    for (const Pool::Result& segment : segments) {
      if (!segment.object) {
        own.push_back({.reason = segment.reason});
        continue;
      }
      // The lease holds all shards of this size, and none of another.
      if (segment.object->header.shard.size != shard.size) {
        own.push_back({.reason = MissReason::kInvalidRequest});
        continue;
      }
      if (segment.object->gone != MissReason::kNone) {
        own.push_back({.reason = segment.object->gone});
        continue;
      }
      own.push_back({.tier = segment.tier, .object = pool.Shard(segment.object, shard)});
      for (uint32_t rank = 0; rank < shard.size; ++rank) {
        if (rank != shard.rank) others.push_back(pool.Shard(segment.object, {.rank = rank, .size = shard.size}));
      }
    }
    return own;
  }

  absl::StatusOr<Match> AttachShard(SessionId session, TenantId tenant, const LeaseId& lease,
                                    const TensorShard& shard) {
    const LeaseTable::Segments& found = *leases.Peek(tenant, lease);
    if (!leases.HasRoom(session, found.size() * shard.size)) {
      return absl::ResourceExhaustedError("lease: a session has no room for another one");
    }
    Others others;
    LeaseTable::Segments own = ForShard(found, shard, others);
    leases.Use(lease);
    Match match = Describe({}, own);
    match.lease = leases.Grant(session, tenant, std::move(own), clock.Now(), std::move(others));
    return match;
  }

  Pool::Result Missed(SessionId session, TenantId tenant, const Query& query, MissReason reason) {
    reason = explainer.Missed(session, tenant, query, reason);
    observer.Miss(tenant, query.kind, reason, query.tokens);
    return {.reason = reason};
  }

  // A landing's `done` that remembers what was missed.
  std::function<void(std::vector<MissReason>)> Explaining(SessionId session, TenantId tenant, const LeaseId& lease,
                                                          const LandTarget& target,
                                                          std::function<void(std::vector<MissReason>)> done) {
    std::vector<uint32_t> indices;  // in the match
    for (const LandTarget::Segment& segment : target.segments) indices.push_back(segment.index);
    return [this, session, tenant, lease, indices = std::move(indices),
            done = std::move(done)](std::vector<MissReason> verdict) {
      const LeaseTable::Segments* found = leases.Held(session, lease);  // none: released meanwhile, or lost before
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
  const Tier& top;
  Observer ignored;
  Observer& observer;
  Drain drain;
  std::map<SessionId, TenantId> sessions;
  Pool pool;  // before everything that holds references
  Explainer explainer;
  LeaseTable leases;
  Publisher publisher;
  Lander lander;
  Composer composer;
  bool draining = false;
};

Cache::Cache(CacheOptions options, const Tiers& tiers, Mover& mover, Executor& copying, const Clock& clock,
             Observer* observer)
    : impl_(std::make_unique<Impl>(std::move(options), tiers, mover, copying, clock, observer)) {}

Cache::~Cache() = default;

void Cache::SetFloor(size_t tier, const Group& group, uint64_t bytes) {
  impl_->pool.placement().SetFloor(tier, group, bytes);
}

void Cache::SetTimeToLive(TenantId tenant, Nanos ttl) {
  impl_->pool.SetTimeToLive(tenant, ttl);
}

void Cache::Adopt(std::vector<SsdTier::Recovered> objects) {
  for (SsdTier::Recovered& object : objects) {
    impl_->pool.Adopt({object.tenant, object.pool}, std::move(object.header), std::move(object.slot));
  }
}

void Cache::OpenSession(SessionId session, TenantId tenant) {
  impl_->sessions.emplace(session, tenant);
}

void Cache::CloseSession(SessionId session, std::function<void()> drained) {
  impl_->sessions.erase(session);
  impl_->lander.CloseSession(session);
  impl_->composer.CloseSession(session);
  impl_->publisher.CloseSession(session);
  impl_->leases.ReleaseAll(session);
  impl_->drain.WhenIdle(session, std::move(drained));
}

Match Cache::Lookup(SessionId session, std::span<const Query> queries, const HasRoom& has_room) {
  const TenantId* tenant = impl_->Tenant(session);
  if (tenant == nullptr) {
    return {.found = std::vector<Found>(queries.size(), Found{.reason = MissReason::kInvalidRequest})};
  }
  size_t listed = 0;
  for (const Query& query : queries) listed += query.shard.size;
  const bool full = !impl_->leases.HasRoom(session, listed);
  const MissReason refused = impl_->draining ? MissReason::kDaemonUnavailable
                             : full          ? MissReason::kBusy
                                             : MissReason::kNone;
  Impl::Others others;
  LeaseTable::Segments segments;
  segments.reserve(queries.size());  // a lease costs what it lists, and no more
  Impl::Verified verified;
  bool any = false;
  Nanos needed_at = impl_->clock.Now();
  for (const Query& query : queries) {
    needed_at = std::max(needed_at, query.needed_at);
    segments.push_back(refused != MissReason::kNone ? impl_->Missed(session, *tenant, query, refused)
                                                    : impl_->Find(session, *tenant, query, verified, others));
    any |= static_cast<bool>(segments.back().object);
  }
  Match match = impl_->Describe({}, segments);
  for (size_t i = 0; i < queries.size(); ++i) {
    Found& found = match.found[i];
    if (found.reason != MissReason::kNone) continue;
    if (has_room && !has_room(found)) {
      found = {.reason = impl_->Missed(session, *tenant, queries[i], MissReason::kBusy).reason};
    } else {
      impl_->observer.Hit(*tenant, queries[i].kind, found.tier, queries[i].tokens);
    }
  }
  if (any) {
    match.lease = impl_->leases.Grant(session, *tenant, std::move(segments), needed_at, std::move(others));
  }
  return match;
}

absl::StatusOr<Match> Cache::Attach(SessionId session, const LeaseId& lease, const std::optional<TensorShard>& shard) {
  const TenantId* tenant = impl_->Tenant(session);
  const LeaseTable::Segments* found = tenant == nullptr ? nullptr : impl_->leases.Peek(*tenant, lease);
  if (found == nullptr) return absl::NotFoundError("lease: unknown");
  const auto of_another = [&](const Pool::Result& segment) {
    return shard && segment.object && segment.object->header.shard != *shard;
  };
  if (std::ranges::any_of(*found, of_another)) return impl_->AttachShard(session, *tenant, lease, *shard);
  const absl::StatusOr<const LeaseTable::Segments*> segments = impl_->leases.Attach(session, *tenant, lease);
  if (!segments.ok()) return segments.status();
  return impl_->Describe(lease, **segments);
}

absl::StatusOr<Match> Cache::Held(SessionId session, const LeaseId& lease) const {
  const LeaseTable::Segments* segments = impl_->leases.Held(session, lease);
  if (segments == nullptr) return absl::NotFoundError("lease: unknown");
  return impl_->Describe(lease, *segments);
}

void Cache::Release(SessionId session, const LeaseId& lease) {
  impl_->leases.Release(session, lease);
}

Cache::Reservation Cache::Reserve(SessionId session, const ObjectHeader& plan, const TextDigest& text, PoolKind pool,
                                  Nanos recompute) {
  const TenantId* tenant = impl_->Tenant(session);
  if (tenant == nullptr || impl_->draining) return {};
  Publisher::Reserved reserved = impl_->publisher.Reserve(session, {*tenant, pool}, plan, recompute);
  const bool present = reserved.outcome == ReserveOutcome::kAlreadyPresent;
  Impl::Verified verified;
  Impl::Others others;
  if (present && !impl_->FindWhole(*tenant, {.key = plan.key, .shard = plan.shard}, verified, others).object) {
    reserved = impl_->publisher.Reserve(session, {*tenant, pool}, plan, recompute);
  }
  const bool known = text != TextDigest{};
  if (known && reserved.outcome == ReserveOutcome::kGranted) impl_->explainer.Published(*tenant, text, plan.ns);
  return {reserved.outcome, reserved.id};
}

const ObjectHeader* Cache::Planned(SessionId session, ReservationId reservation) const {
  return impl_->publisher.Planned(session, reservation);
}

void Cache::Publish(SessionId session, ReservationId reservation, PublishSource source,
                    std::function<void(PublishOutcome)> done) {
  impl_->publisher.Publish(session, reservation, std::move(source), std::move(done));
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
  const LeaseTable::Segments* found = tenant == nullptr ? nullptr : impl_->leases.Held(session, lease);
  if (found == nullptr) {
    const size_t segments = target.segments.size();
    for (size_t i = 0; tenant != nullptr && i < segments; ++i) {
      impl_->observer.Miss(*tenant, ObjectKind::kSegment, MissReason::kLeaseLost, 0);
    }
    return callbacks.done(std::vector<MissReason>(segments, MissReason::kLeaseLost));
  }
  impl_->leases.Use(lease);
  impl_->lander.Land(session, *tenant, landing, *found, impl_->leases.Verified(lease), std::move(target),
                     std::move(callbacks));
}

void Cache::Compose(SessionId session, LandingId number, const LeaseId& lease, Composition composition,
                    std::function<void(CompositionVerdict)> done) {
  const TenantId* tenant = impl_->Tenant(session);
  const LeaseTable::Segments* found = tenant == nullptr ? nullptr : impl_->leases.Held(session, lease);
  if (tenant == nullptr || (found == nullptr && lease != LeaseId{})) {
    const std::vector<MissReason> lost(composition.interiors.size(), MissReason::kLeaseLost);
    if (tenant != nullptr) impl_->observer.Composed(*tenant, MissReason::kLeaseLost, 0);
    return done({MissReason::kLeaseLost, lost});
  }
  if (found == nullptr) {
    const VerifiedLayers nothing(0);
    return impl_->composer.Compose(session, *tenant, number, {}, nothing, std::move(composition), std::move(done));
  }
  impl_->leases.Use(lease);
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
  return impl_->pool.Pin(tenant, key, until);
}

bool Cache::Unpin(TenantId tenant, const Key& key) {
  return impl_->pool.Unpin(tenant, key);
}

bool Cache::Evict(TenantId tenant, const Key& key) {
  return impl_->pool.Evict(tenant, key);
}

std::vector<TierKind> Cache::Where(TenantId tenant, const Key& key, const TensorShard& shard) const {
  return impl_->pool.Where(impl_->pool.Peek(tenant, key, shard));
}

void Cache::StartDrain() {
  impl_->draining = true;
  impl_->pool.Flush();
}

void Cache::EndDrain() {
  impl_->draining = false;
  impl_->pool.placement().EndFlush();
}

bool Cache::draining() const {
  return impl_->draining;
}

void Cache::Tick() {
  impl_->leases.Expire(impl_->clock.Now());
  impl_->publisher.Expire();
  impl_->pool.Tick();
}

Cache::Stats Cache::stats() const {
  return {.objects = impl_->pool.objects(),
          .object_bytes = impl_->pool.object_bytes(),
          .leases = impl_->leases.size(),
          .reservations = impl_->publisher.reservations(),
          .landings = impl_->lander.landings(),
          .compositions = impl_->composer.compositions(),
          .copies_under_way = impl_->pool.placement().fills(),
          .unsaved = impl_->pool.placement().unsaved()};
}

}  // namespace ashlar::storage
