// SPDX-License-Identifier: Apache-2.0
// Cache: the façade of storage. It decides which objects are kept, for whom, and for how long.
//
// A deterministic state machine: the metadata thread makes all calls and gets all callbacks. The same clock, random
// source, calls and order of completions give the same result. The Mover moves bytes on the injected executor.
//
// Sessions hold leases and reservations. An object that is leased, being published or being landed stays; any other
// object may be evicted when its tenant needs space.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/key.h"
#include "proto/limits.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/adoption.h"
#include "storage/executor.h"
#include "storage/history/explanation.h"
#include "storage/history/miss_log.h"
#include "storage/history/text_table.h"
#include "storage/ids.h"
#include "storage/lookup/explainer.h"
#include "storage/lookup/lease.h"
#include "storage/lookup/match.h"
#include "storage/objects/object_table.h"
#include "storage/objects/offers.h"
#include "storage/objects/residences.h"
#include "storage/objects/retention.h"
#include "storage/observer.h"
#include "storage/open_sessions.h"
#include "storage/prefix/prefixes.h"
#include "storage/slice.h"
#include "storage/tier/tiers.h"
#include "storage/transfer/composition.h"
#include "storage/transfer/in_flight.h"
#include "storage/transfer/lander.h"
#include "storage/transfer/rates.h"
#include "storage/transfer/transfer.h"
#include "storage/upkeep/upkeep.h"

namespace ashlar::storage {

struct CacheOptions {
  Nanos unused_lease = 60'000'000'000;  // an unused match ends this long after the time of need
  Nanos reservation = 60'000'000'000;   // an unpublished reservation ends after this
  // Limits of one session. A session at a limit gets no further lease until it releases one.
  size_t leases_per_session = limits::kMaxLeases;
  size_t leased_segments_per_session = limits::kMaxLeasedSegments;
  size_t leases_per_tenant = LeaseTable::kTenantLeases;  // limit for all sessions of a tenant
  size_t leased_segments_per_tenant = LeaseTable::kTenantSegments;
  // Landings in flight per session; further ones are answered kBusy.
  size_t landings_per_session = SIZE_MAX;
  size_t compositions_per_session = limits::kMaxCompositions;
  ObjectTableOptions objects;
  size_t texts_per_tenant = TextTable::kDefaultTexts;  // remembered texts, to explain misses in another namespace
  size_t misses_per_tenant = MissLog::kDefaultMisses;  // misses that LastMisses can return
  std::function<uint64_t()> random;                    // makes lease ids; a simulator passes a seeded one
};

// Limits of one tenant. Empty ones stay as they are.
struct TenantBounds {
  std::optional<InFlight::Bounds> in_flight = {};  // landings and compositions; unlimited by default
  // The bytes of exact prefixes per namespace. The default is the capacity of the tenant's largest tier.
  std::optional<uint64_t> prefix_bytes = {};
  struct Leases {
    size_t leases, segments;
  };
  std::optional<Leases> leases = {};  // limits all its sessions; the defaults are in CacheOptions
};

class Mover;
class Prober;
class Search;

// Long calls have two forms: one is complete when it returns; the other works in slices (storage/slice.h), and must be
// called again until it is done, so that other work runs in between.
class Cache {
 public:
  // All arguments must outlive the cache; `observer` may be null. `mover` works in the memory tiers, `copying` between
  // them. Before the cache is destroyed, every session must be closed and drained, and the executors idle.
  Cache(CacheOptions options, const Tiers& tiers, Mover& mover, Executor& copying, const Clock& clock,
        Observer* observer);
  ~Cache();

  // Call before any session is opened. Sets the bytes of a tier that a tenant's pool keeps for itself (0 initially;
  // storage/objects/level.h).
  void SetFloor(size_t tier, const TenantPool& pool, uint64_t bytes);
  void SetBounds(TenantId tenant, const TenantBounds& bounds);
  // Limits the bytes per second of tenants' landings and publishes; more are missed or answered with kBusy.
  Rates& byte_rates();

  void OpenSession(SessionId session, TenantId tenant, SessionOf whose = SessionOf::kEngine);
  // Sets the memory tier, by its index in Tiers::memory, that the session's engine publishes to, lands from and maps;
  // initially Tiers::common. Lookups load objects there. Unknown sessions are ignored.
  void SetLevel(SessionId session, size_t level);
  // Ends the session's leases and reservations. Landings and publishes in flight are cancelled and drained first.
  // `drained` is called when nothing accesses the session's memory any more.
  void CloseSession(SessionId session, const std::function<void()>& drained) {
    Slice whole;
    CloseSession(session, drained, whole);
  }
  // Closes a session in slices; the first slice closes it. Returns the numbers of ended leases and reservations after
  // the last slice.
  struct Freed {
    size_t leases = 0, reservations = 0;
  };
  std::optional<Freed> CloseSession(SessionId session, const std::function<void()>& drained, Slice& slice);

  // Looks up every query, and leases the objects it finds under one lease for the whole match. An object with a changed
  // header is dropped and missed with kChecksumFailed. If the session would exceed its limits, everything is missed
  // with kBusy, and an Attach is refused with RESOURCE_EXHAUSTED. `has_space` is asked in order; a hit without space in
  // the reply is answered and counted as kBusy, but is leased. Objects that are needed later are prefetched, and the
  // lease's deadline counts from the latest time of need. `lease` is the id of the lease; if it is in use, everything
  // is missed with kInvalidRequest. All zero: a random id.
  Match Lookup(SessionId session, std::span<const Query> queries, const HasSpace& has_space = nullptr,
               const LeaseId& lease = {});
  // Looks up a prompt that may also resume. The queries are its segments from position 0. The lookup takes the cover of
  // prefix and segments that saves most (storage/prefix/cover.h). Segments whose heads end inside the prefix are
  // answered kCovered without a lookup.
  Match Lookup(SessionId session, std::span<const Query> queries, const PrefixText& prompt, const HasSpace& has_space,
               const LeaseId& lease = {});
  // Either lookup in slices; `prompt` may be null. Queries, prompt and cache must outlive the search.
  std::unique_ptr<Search> StartLookup(SessionId session, std::span<const Query> queries, const PrefixText* prompt,
                                      HasSpace has_space, const LeaseId& lease = {});
  // Estimates what a lookup of an engine that lands from the common tier would find. No lease, no use, no other side
  // effect. `head` and `tail` are the model's seams. Queries, prompt and cache must outlive the prober.
  std::unique_ptr<Prober> StartProbe(TenantId tenant, std::span<const Query> queries, const PrefixText* prompt,
                                     uint64_t head, uint64_t tail);
  // Returns another session's match, and makes this session a holder of its lease. NOT_FOUND for an unknown lease or
  // one of another tenant. If `shard` differs from the shard of the lookup, the session gets a lease of its own, with
  // its shard of each bundle. That lease expires when unused like a lookup's, and an object of a bundle of another size
  // is missed with kInvalidRequest. Without `shard`, returns the original match.
  absl::StatusOr<Match> Attach(SessionId session, const LeaseId& lease,
                               const std::optional<TensorShard>& shard = std::nullopt);
  void Release(SessionId session, const LeaseId& lease);
  // Releases in two parts. EndLease ends the session's hold immediately, even if a session attaches again meanwhile.
  // SettleLeases releases the objects of the tenant's ended leases in slices; returns false if more is left.
  void EndLease(SessionId session, const LeaseId& lease);
  bool SettleLeases(SessionId session, Slice& slice);
  // Returns the objects of a lease that this session holds; NOT_FOUND for any other lease. Has no side effect, not even
  // on the lease's age. For checking targets before Land.
  absl::StatusOr<Match> Held(SessionId session, const LeaseId& lease) const;
  bool Holds(SessionId session, const LeaseId& lease) const;

  struct Reservation {
    ReserveOutcome outcome = ReserveOutcome::kUnavailable;
    ReservationId id = 0;
  };
  // `plan` must come from PlanObject. `text` is its text (all zero: unknown); it lets a miss of the same text in
  // another namespace report kNamespaceDiffers. Evicts what is needed for space, and drops an existing object with a
  // changed header. Returns kDeclined, without a reservation, if landing would take longer than `recompute`, the time
  // to compute the object (0: unknown). `flops` are those to compute it (0: unknown), and are its worth in evictions. A
  // plan without tokens only reserves space until Abandon.
  Reservation Reserve(SessionId session, const ObjectHeader& plan, const TextDigest& text = {},
                      PoolKind pool = PoolKind::kPublic, Nanos recompute = 0, double flops = 0);
  // Call before Reserve. Returns true if the object's tier first gets memory from the system on another thread, as
  // Tier::WhenGrown does; then `call` follows.
  bool WhenGrown(SessionId session, const ObjectHeader& plan, std::function<void(bool grown)> call);
  // Returns the plan of a reservation of this session; null if unknown. For checking sources before Publish.
  const ObjectHeader* Planned(SessionId session, ReservationId reservation) const;
  // Calls `call` when the first `extents` of an object of a held lease are in the memory tier, or never will be;
  // immediately if that is already known. Returns false without calling it if there is no such object.
  bool WhenLoaded(SessionId session, const LeaseId& lease, size_t index, uint64_t extents,
                  std::function<void(bool whole)> call);
  // Copies and hashes in one pass. Others find the object only after `done(kPublished)`, which may be called before
  // Publish returns. kBusy keeps the reservation; every other outcome ends it.
  void Publish(SessionId session, ReservationId reservation, PublishSource source,
               std::function<void(PublishOutcome)> done);
  void Abandon(SessionId session, ReservationId reservation);

  // Stores the parts of a computed text that are worth it (storage/prefix/prefixes.h). One outcome per checkpoint, when
  // the engine's memory is no longer read. A commit called exact, under a lease from which segments or composed states
  // were landed, gets kBadSource for all.
  void Commit(SessionId session, PrefixCommit commit, std::function<void(std::vector<CommitOutcome>)> done);

  // Lands the given segments of a lease layer by layer, and verifies the checksums of their tuples, which the engine
  // reads in place (only these for a segment without tokens). A copy with a wrong checksum is dropped. A segment that
  // does not fit the target (an index outside the match, pages of another shape, a short page table) is not touched and
  // is missed with kInvalidRequest; so is every segment of a landing whose id the session already uses. `done` may be
  // called before Land returns.
  void Land(SessionId session, LandingId landing, const LeaseId& lease, LandTarget target, LandCallbacks callbacks);
  // Applies interiors of a lease (all zero: none needed) and runs of tokens to running states. Tuples that no landing
  // of this lease has verified are verified first; a copy with a wrong checksum is dropped. Nothing is written unless
  // every interior is available. Numbers are shared with landings: a number in use by this session is kInvalidRequest.
  // `done` may be called before Compose returns.
  void Compose(SessionId session, LandingId number, const LeaseId& lease, Composition composition,
               std::function<void(CompositionVerdict)> done);
  // Cancels the landing or composition, then calls `quiesced` when it no longer writes (immediately if it is unknown).
  void Quiesce(SessionId session, LandingId landing, std::function<void()> quiesced);

  // Parts of the cache, for callers other than engines.
  Adoption& adoption();                  // objects that exist elsewhere
  Retention& retention();                // pins, evictions and expiry
  const Residences& residences() const;  // reports where objects are
  const Explainer& explainer() const;    // explains misses
  Upkeep& upkeep();                      // lists, counts, erases and verifies many objects
  Offers& offers();                      // drains, and objects that other nodes take or offer
  const Prefixes& prefixes() const;

  // Ends expired leases, reservations and objects, and retries copies that were waiting for space. Call it about once
  // per second.
  void Tick() {
    Slice whole;
    Tick(whole);
  }
  bool Tick(Slice& slice);  // works in slices; returns false if more is left

  struct Stats {
    uint64_t objects = 0;
    uint64_t object_bytes = 0;
    uint64_t leases = 0;
    uint64_t reservations = 0;
    uint64_t landings = 0;
    uint64_t compositions = 0;
    uint64_t copies_under_way = 0;  // between tiers
    Placement::MemoryOnly memory_only;
    PoolShares pools;
  };
  Stats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::storage
