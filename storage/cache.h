// SPDX-License-Identifier: Apache-2.0
// Cache: the one façade of storage. It decides which objects are kept, for whom, and for how long.
//
// A deterministic state machine: one thread (the metadata thread) makes all calls, and all callbacks come on it. The
// same clock, random source, calls and order of completions give the same result. The Mover moves bytes on the injected
// executor.
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
#include "storage/executor.h"
#include "storage/history/explanation.h"
#include "storage/history/miss_log.h"
#include "storage/history/text_table.h"
#include "storage/ids.h"
#include "storage/lookup/lease.h"
#include "storage/lookup/match.h"
#include "storage/objects/object_table.h"
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
  Nanos unused_lease = 60'000'000'000;  // a match that was never used ends so long after it is needed
  Nanos reservation = 60'000'000'000;   // a reservation that was never published is reclaimed after this
  // A session that holds this many leases, or leases that list this many segments, gets no more until it releases some.
  size_t leases_per_session = limits::kMaxLeases;
  size_t leased_segments_per_session = limits::kMaxLeasedSegments;
  size_t leases_per_tenant = LeaseTable::kTenantLeases;  // of all its sessions
  size_t leased_segments_per_tenant = LeaseTable::kTenantSegments;
  // Landings in flight; a landing beyond the bound is answered kBusy.
  size_t landings_per_session = SIZE_MAX;
  size_t compositions_per_session = limits::kMaxCompositions;
  ObjectTableOptions objects;
  size_t texts_per_tenant = TextTable::kDefaultTexts;  // and under which namespaces texts were published
  size_t misses_per_tenant = MissLog::kDefaultMisses;  // that LastMisses can tell
  std::function<uint64_t()> random;                    // for lease ids; a simulator passes a seeded one
};

class Mover;
class Search;

// A call that can take long comes in two forms: one is done when it returns; the other works in slices
// (storage/slice.h), and its caller calls again until all is done, serving others in between.
class Cache {
 public:
  // All referenced objects must outlive the cache; `observer` may be null. `mover` works in the memory tiers,
  // `copying` between them. Before the cache is destroyed every session must be closed and drained, and the executors
  // must be idle.
  Cache(CacheOptions options, const Tiers& tiers, Mover& mover, Executor& copying, const Clock& clock,
        Observer* observer);
  ~Cache();

  // Before any session is opened. SetFloor: the bytes that a pool of a tenant keeps for itself in a tier (0: the first;
  // storage/objects/level.h). SetTimeToLive: how long the tenant's objects are kept unused (0: until space is needed).
  void SetFloor(size_t tier, const TenantPool& pool, uint64_t bytes);
  void SetTimeToLive(TenantId tenant, Nanos ttl);
  // Bounds the landings and compositions that a tenant may have in flight, and the memory that they may hold; without a
  // call any number.
  void SetInFlight(TenantId tenant, const InFlight::Bounds& bounds);
  // The bytes that tenants' landings and publishes may move in a second: more are missed, and answered, with kBusy.
  Rates& byte_rates();
  const Rates& byte_rates() const;
  // Bounds the bytes of a tenant's exact prefixes in each namespace; without a call they may take as much as the
  // tenant's largest tier has.
  void SetPrefixCapacity(TenantId tenant, uint64_t bytes);
  // Bounds the leases that a tenant's sessions may hold together, and the segments in them; without a call the bounds
  // are those of CacheOptions.
  void SetLeaseBounds(TenantId tenant, size_t leases, size_t segments);
  // Takes in the objects that SsdTier::Recover returned: look-ups find them from now on, except those that have been
  // published meanwhile. Before any session, or once a disk that could not be opened is attached. `more`: others follow
  // in another call, and until the last have come nothing can be erased.
  void Adopt(std::vector<SsdTier::Recovered> objects, bool more = false);

  // Takes in an object that another node has, so that look-ups find it there and bring it up from Tiers::remote; `cost`
  // estimates how long that takes (0: not known). The copy is released once this node has one of its own, or nobody
  // refers to the object. False: the object is here already, and the copy is not taken. Until the look-up that it is
  // meant for has ended, it is kept; then SettleRemote lets it go unless it is in use.
  bool AdoptRemote(const TenantPool& pool, ObjectHeader header, RemoteCopyId copy, Nanos cost);
  void SettleRemote(TenantId tenant, const Key& key, const TensorShard& shard);
  // Says of all objects again where they reside (ObjectTableOptions::residence), in slices; false: call again.
  bool TellAll(Telling& telling, Slice& slice);
  // Returns whether anything is known here under the key: published, reserved or adopted, any shard of it.
  bool Knows(TenantId tenant, const Key& key) const;

  void OpenSession(SessionId session, TenantId tenant, SessionOf whose = SessionOf::kEngine);
  // The memory tier, by its place in Tiers::memory, that the session's engine publishes to, lands from and maps, from
  // now on; until it is set Tiers::common. Its look-ups have objects brought there. Harmless for an unknown session.
  void SetLevel(SessionId session, size_t level);
  // Frees what the session held: its part in leases, its reservations. Landings and publishes in flight are cancelled
  // and drain first; `drained` is called when nothing of the session's memory is touched any more.
  void CloseSession(SessionId session, const std::function<void()>& drained) {
    Slice whole;
    CloseSession(session, drained, whole);
  }
  // Closes a session in slices; the first slice closes it. Returns the counts of its leases and reservations after the
  // last slice.
  struct Freed {
    size_t leases = 0, reservations = 0;
  };
  std::optional<Freed> CloseSession(SessionId session, const std::function<void()>& drained, Slice& slice);

  // Looks up every query and leases the objects that it finds, under one lease for the whole match. An object whose
  // stored header has changed is dropped and missed with kChecksumFailed. If the session would hold too many leases, or
  // too many segments in them, everything is missed with kBusy, and an Attach is refused with RESOURCE_EXHAUSTED.
  // `has_room` is asked in order; a hit for which it has no room is answered and counted as a miss with kBusy, but is
  // leased. Objects that are needed later than now are fetched ahead, and the lease's deadline counts from the last
  // time of need. `lease`: the name of the lease; if another lease has it, everything is missed with kInvalidRequest.
  // All zero: a name is drawn.
  Match Lookup(SessionId session, std::span<const Query> queries, const HasRoom& has_room = nullptr,
               const LeaseId& lease = {});
  // The same for a prompt that may also resume; the queries are its segments from position 0 on. The look-up takes the
  // cover of prefix and segments that saves most (storage/prefix/cover.h): segments whose heads end before the prefix
  // does are answered kCovered and are not looked up.
  Match Lookup(SessionId session, std::span<const Query> queries, const PrefixText& prompt, const HasRoom& has_room,
               const LeaseId& lease = {});
  // Either look-up in slices; `prompt` may be null. Queries, prompt and cache must outlive the search.
  std::unique_ptr<Search> StartLookup(SessionId session, std::span<const Query> queries, const PrefixText* prompt,
                                      HasRoom has_room, const LeaseId& lease = {});
  // Returns another session's match and makes this session a holder of its lease. NOT_FOUND for an unknown lease, also
  // for another tenant's. If `shard` differs from the shard of the look-up, the session gets a lease of its own, with
  // its shard of each bundle; that lease ends unused like one of a look-up, and an object of a bundle of another size
  // is missed with kInvalidRequest. `shard` none: the match as it was found.
  absl::StatusOr<Match> Attach(SessionId session, const LeaseId& lease,
                               const std::optional<TensorShard>& shard = std::nullopt);
  void Release(SessionId session, const LeaseId& lease);
  // The same in two parts. EndLease ends the session's hold at once, whoever attaches to the lease again meanwhile;
  // SettleLeases gives back, in slices, what the ended leases of the session's tenant listed. False: call it again.
  void EndLease(SessionId session, const LeaseId& lease);
  bool SettleLeases(SessionId session, Slice& slice);
  // Returns the objects of a lease that this session holds; NOT_FOUND for any other lease. Changes nothing, not even
  // the lease's age. For checking targets before Land.
  absl::StatusOr<Match> Held(SessionId session, const LeaseId& lease) const;
  bool Holds(SessionId session, const LeaseId& lease) const;

  struct Reservation {
    ReserveOutcome outcome = ReserveOutcome::kUnavailable;
    ReservationId id = 0;
  };
  // `plan` is PlanObject's answer, `text` what it is of (all zero: not known): a miss of the same text under
  // another namespace says so (kNamespaceDiffers). Evicts what is needed to make room, and drops an object that is
  // there already but whose stored header has changed. kDeclined: to land so many bytes takes longer than `recompute`,
  // what computing them again takes (0: not known); nothing is reserved. `flops`, which that takes (0: not known), is
  // what having the object is worth when others need its space. A plan of no tokens is for room alone, until Abandon.
  Reservation Reserve(SessionId session, const ObjectHeader& plan, const TextDigest& text = {},
                      PoolKind pool = PoolKind::kPublic, Nanos recompute = 0, double flops = 0);
  // The plan behind a reservation of this session; null when unknown. For checking sources before Publish.
  const ObjectHeader* Planned(SessionId session, ReservationId reservation) const;
  // Calls `call` once the first `extents` of an object of a lease that this session holds are whole at the top, or
  // never will be: at once if that is already so. False: there is no such object, and `call` is dropped.
  bool WhenLoaded(SessionId session, const LeaseId& lease, size_t index, uint64_t extents,
                  std::function<void(bool whole)> call);
  // Copies in and checksums in the same pass; the object is found by others only after `done(kPublished)`, which may be
  // called before Publish returns. kBusy leaves the reservation as it was; every other outcome ends it.
  void Publish(SessionId session, ReservationId reservation, PublishSource source,
               std::function<void(PublishOutcome)> done);
  void Abandon(SessionId session, ReservationId reservation);

  // Keeps of a text that was computed what is worth it (storage/prefix/prefixes.h); one outcome a checkpoint, when
  // nothing of the engine's memory is read any more. Called exact under a lease that segments, or a conversation's
  // composed states, were landed from: all are kBadSource.
  void Commit(SessionId session, PrefixCommit commit, std::function<void(std::vector<CommitOutcome>)> done);

  // Lands the given segments of a lease layer by layer; also verifies the checksums of their tuples, which the engine
  // reads in place (of segments of no token these alone). A copy that fails its checksum is dropped from the cache. A
  // segment that does not fit the target (an index outside the match, pages of another shape, a page table too short)
  // is not touched and missed with kInvalidRequest; so is every segment of a landing whose id this session already
  // uses. `done` may be called before Land returns.
  void Land(SessionId session, LandingId landing, const LeaseId& lease, LandTarget target, LandCallbacks callbacks);
  // Applies interiors of a lease (all zero: none is needed) and runs of tokens to running states. Tuples that no
  // landing of this lease has verified are verified first; a copy that fails its checksum is dropped from the cache.
  // Nothing is written unless every interior can be had. Numbers are those of landings: a number that a composition of
  // this session has in use is kInvalidRequest. `done` may be called before Compose returns.
  void Compose(SessionId session, LandingId number, const LeaseId& lease, Composition composition,
               std::function<void(CompositionVerdict)> done);
  // Cancels, then calls `quiet` once nothing writes for that landing or composition any more (at once when it is
  // unknown).
  void Quiesce(SessionId session, LandingId landing, std::function<void()> quiet);

  // Explains what look-ups of this tenant would find, or why they would miss. It takes no lease, counts as no use, and
  // changes nothing; only a look-up finds out that a header has changed.
  std::vector<Explanation> Explain(TenantId tenant, std::span<const Query> queries) const;
  // The latest of the tenant's segments that look-ups and landings missed, newest first.
  std::vector<Miss> LastMisses(TenantId tenant, size_t most) const;

  // For operators; the calls act on all objects of a key. Pin: until `until` (0: for good) the object stays in some
  // tier, whoever needs the space; a second pin replaces the first. Evict: the object leaves all tiers; its leased
  // bytes leave with their leases. False: there is no such object.
  bool Pin(TenantId tenant, const Key& key, Nanos until);
  bool Unpin(TenantId tenant, const Key& key);
  bool Evict(TenantId tenant, const Key& key);
  // Returns the tiers that have a whole copy, top to bottom; a disk counts once it has acknowledged the copy. Counts as
  // no use of the object.
  std::vector<TierKind> Where(TenantId tenant, const Key& key, const TensorShard& shard = {}) const;

  // Lists, counts, erases and verifies many of them.
  Upkeep& upkeep();
  const Upkeep& upkeep() const;

  // Draining, before the memory tiers are lost. Look-ups miss everything (kDaemonUnavailable) and nothing is reserved
  // (kUnavailable); calls under way continue. Objects that memory alone has are written to the disk as far as there is
  // free room, whatever admission says: pinned ones first, then those found most often. StartDrain may be called again:
  // it starts over with the objects that are left. EndDrain makes the cache take requests again.
  void StartDrain();
  void EndDrain();
  bool draining() const;
  // Objects that this node may hand to others, or take from them.
  Offers& offers();
  const Prefixes& prefixes() const;

  // Ends leases, reservations and objects that are past their deadlines, and continues copies that found no room. Call
  // it about once a second.
  void Tick() {
    Slice whole;
    Tick(whole);
  }
  bool Tick(Slice& slice);  // in slices: false: call again

  struct Stats {
    uint64_t objects = 0;
    uint64_t object_bytes = 0;
    uint64_t leases = 0;
    uint64_t reservations = 0;
    uint64_t landings = 0;
    uint64_t compositions = 0;
    uint64_t copies_under_way = 0;  // between tiers
    Placement::Unsaved unsaved;
    PoolShares pools;
  };
  Stats stats() const;
  Prefixes::Stats prefix_stats(TenantId tenant) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ashlar::storage
