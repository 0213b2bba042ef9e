// SPDX-License-Identifier: Apache-2.0
// ObjectTable: the objects of all tenants. Finds them by key, counts references, pins them, and ends them with a
// reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/functional/function_ref.h"
#include "storage/executor.h"
#include "storage/history/explanation.h"
#include "storage/history/ghost_table.h"
#include "storage/objects/entry.h"
#include "storage/objects/offers.h"
#include "storage/objects/placement.h"
#include "storage/objects/segment_table.h"
#include "storage/observer.h"
#include "storage/policy/admission.h"
#include "storage/policy/promotion.h"
#include "storage/slice.h"
#include "storage/tier/tiers.h"

namespace ashlar::storage {

// Location of an object on this node.
struct Residence {
  TierKind nearest = TierKind::kNone;  // first tier with a whole copy; kNone if there is no copy
  bool saved = false;                  // a disk has a whole copy
  uint32_t uses = 0;                   // lookups that found it
  TierKind told = TierKind::kNone;     // result of the last call
  TierKind was = TierKind::kNone;      // `nearest` at the last call
  uint8_t level = 0,
          was_level =
              0;  // level of `nearest` and `was`: index into Tiers::memory, which distinguishes tiers of several GPUs
};

// Progress of a walk that reports the location of every object again.
struct Telling {
  bool lost = false;  // other nodes have lost earlier reports
  ObjectId after = 0,
           last = 0;  // `after`: last reported object; `last`: last object to report; 0: the walk has not begun
};

using TellResidence = std::function<TierKind(const TenantPool&, const ObjectHeader&, const Residence&)>;

struct ObjectTableOptions {
  size_t ghosts_per_tenant = GhostTable::kDefaultGhosts;
  AdmissionMode admission = AdmissionMode::kSecondUse;  // admission to the disk
  size_t admission_keys = 1 << 20;                      // number of keys with counted uses
  EvictionMode eviction = EvictionMode::kPrice;
  // Called when the nearest tier of an object changes, when a disk has a copy, and when a lookup finds the object for
  // the second time. Returns what it has announced to other nodes: kNone or the tier. It must not call the table. May
  // be empty.
  TellResidence residence;
};

// Guarantees: a referenced object stays in place, and an object that is neither referenced nor pinned never blocks an
// allocation, except while a copy of it is in flight between tiers.
class ObjectTable final : public Offers {
 public:
  ObjectTable(ObjectTableOptions options, const Tiers& tiers, Executor& copying, const Clock& clock,
              Observer& observer);
  ~ObjectTable() override;

  // One use of an object. While the reference lives, its header and its copy at this level stay: the tier from which an
  // engine lands it or maps it. Must not outlive the table.
  class Reference {
   public:
    Reference() = default;
    Reference(Reference&& other) noexcept;
    Reference& operator=(Reference&& other) noexcept;
    ~Reference();

    Reference Share() const;  // a further use of the same copy
    explicit operator bool() const { return entry_ != nullptr; }
    const Entry* operator->() const { return entry_; }
    const Entry& operator*() const { return *entry_; }
    size_t level() const { return level_; }
    const Copy& copy() const { return entry_->copies[level_]; }
    const Tier& tier() const { return entry_->table->placement_.TierAt(level_); }

   private:
    friend class ObjectTable;
    Reference(Entry& entry, size_t level);
    Entry* entry_ = nullptr;
    uint8_t level_ = 0;
  };

  struct Result {
    MissReason reason = MissReason::kNone;  // kNone: `object` is set
    TierKind tier = TierKind::kNone;        // tier that had it
    Reference object;
  };
  // Finds a published object and counts as a use of it. If this level lacks the object, its promotion to the level
  // begins (WhenLoaded); the object with the earliest need is promoted first. If promotion and landing would take
  // longer than computing, the result is the miss kSlowerThanRecompute. A shard of a bundle is found only if all shards
  // are present; references to the others, at the levels of their ranks, are added to `others`. kWhereItLies is for
  // other nodes: the common level, or the level of a GPU if only that GPU has the object. It applies to every shard.
  static constexpr size_t kWhereItLies = SIZE_MAX;
  Result Find(TenantId tenant, const Query& query, std::vector<Reference>* others = nullptr, size_t level = 0);
  // Returns another shard of an object's bundle, at the level of its rank; empty if the shard is missing or the object
  // has ended.
  Reference Shard(const Reference& object, const TensorShard& shard);
  // Returns the shard at this level and starts its promotion there: for a rank of an engine at that level. A miss if
  // there is no room.
  Result ShardAt(const Reference& object, const TensorShard& shard, size_t level);

  struct Room {
    ReserveOutcome outcome = ReserveOutcome::kNoSpace;
    Reference object;  // set if granted
  };
  // Counts a request. Idle times of objects are measured in requests.
  void Requested(TenantId tenant) { reuse_.Tick(tenant); }

  // Does not write a reserved object to the disk even if admission allows it: for checkpoints that are not worth
  // writing yet. It is written in a drain, after a query without `defer` finds it, or after it was found kFoundTwice
  // times. All shards of a bundle follow the first one. No effect without a disk, or if its admission takes everything.
  void Defer(TenantId tenant, const Key& key, const TensorShard& shard);
  bool defers() const { return placement_.has_disk() && admission_.mode() != AdmissionMode::kAll; }
  // Returns whether the disk has the object or is writing it.
  bool IsSaved(TenantId tenant, const Key& key, const TensorShard& shard) const {
    const Entry* const entry = Peek(tenant, key, shard);
    return entry != nullptr && placement_.Saving(*entry);
  }

  // Allocates room at the level for a new object, and evicts idle objects if necessary (storage/objects/level.h). Only
  // the caller can use the object until Publish; if its last reference ends before, it is abandoned. An object that
  // would take longer to land than `recompute` (0: unknown) is declined. `flops`: FLOPs that a hit saves (0: unknown;
  // estimated).
  Room Reserve(const TenantPool& pool, const ObjectHeader& plan, Nanos recompute = 0, double flops = 0,
               size_t level = 0);
  // `header` is the plan with checksums, or a header with other forms that takes no more extents. Surplus extents are
  // freed. From now on lookups find the object.
  void Publish(const Reference& object, ObjectHeader header);
  // Ends the object and the other shards of its bundle: lookups no longer find them; the bytes stay until the last
  // reference ends. No effect if the object has ended.
  void Drop(const Reference& object, MissReason why, PolicyKind policy = PolicyKind::kNone);

  // Calls `call` once the first `bytes` of the reference's copy are whole, or when they will not arrive (Lost). Calls
  // immediately if that is already so.
  void WhenLoaded(const Reference& object, uint64_t bytes, std::function<void()> call);
  // Returns why the missing bytes of the reference's copy will not arrive (Placement::Lost); kNone if they will.
  MissReason Lost(const Reference& object) const { return placement_.Lost(*object.entry_, object.level()); }

  // Reports that so many bytes have landed; `took` excludes the time that the landing waited for promotions.
  void Landed(TenantId tenant, uint64_t bytes, Nanos took) { promotion_[tenant].Landed(bytes, took); }

  // Adds an object that was found on the disk after a restart.
  void Adopt(const TenantPool& pool, ObjectHeader header, Slot slot);

  // Reports the location of every object again, one per step. Returns false if more are left: call again.
  bool TellAll(Telling& telling, Slice& slice);

  // Calls `visit` for each object with a number above `after` and up to `last`, in the order of numbers, one per step,
  // until `visit` returns false. This includes unpublished objects, and ended ones that are still in use. `after`
  // becomes the number of the last visited object. Returns false if the slice ended first: call again. `visit` may end
  // objects, including the visited one.
  bool Walk(ObjectId& after, ObjectId last, Slice& slice, absl::FunctionRef<bool(Entry&)> visit);
  ObjectId newest() const { return next_id_ - 1; }
  Entry* Find(ObjectId id) { return Living(id); }  // null if it has ended; not counted as a use
  // Erases an object with its bundle for an operator: its bytes on a disk are overwritten, and no ghost is left. An
  // object that is being published ends after publication. No effect if it has ended.
  void Erase(ObjectId id);
  // Erases the history of ended objects of a tenant, or of one of its namespaces.
  void DropGhosts(TenantId tenant, const NamespaceId* ns) { ghosts_.EraseAll(tenant, ns); }
  // OnDisk: returns whether bytes of an ended object are still on the disk or being written there. Shred: the same, and
  // overwrites them.
  bool OnDisk(ObjectId id) const;
  bool Shred(ObjectId id);

  // Adds an object that another node has (storage/tier/remote_source.h): lookups find it and fetch it from there;
  // `cost` estimates the time (0: unknown). Returns false, without taking the copy, if the object already exists.
  bool AdoptRemote(const TenantPool& pool, ObjectHeader header, RemoteCopyId copy, Nanos cost);
  // Ends an adopted object without references. No effect on other objects.
  void SettleRemote(TenantId tenant, const Key& key, const TensorShard& shard);

  // The next three act on all objects of a key. They return false if there are none.
  //
  // Until `until` (0: without end) one copy stays in some tier. A second pin replaces the first.
  bool Pin(TenantId tenant, const Key& key, Nanos until);
  bool Unpin(TenantId tenant, const Key& key);
  // The object leaves all tiers; leased bytes leave with their leases.
  bool Evict(TenantId tenant, const Key& key);
  // Ends an object that is no longer wanted; a referenced or pinned one ends with its last use. A Reserve meanwhile
  // finds and keeps it.
  void GiveUp(TenantId tenant, const Key& key);
  // Objects of this tenant expire after so long without use (0: never).
  void SetTimeToLive(TenantId tenant, Nanos ttl);
  // Ends pins and expires objects, one per step, and continues copies that found no room. Returns false if more are
  // left: call again.
  bool Tick(Slice& slice);

  // Leaves the cache as it is, as if the process were killed: references that end from now on end no objects.
  void Close() { closed_ = true; }

  // Writes objects that are only in memory to the disk: pinned ones first, then by value (Placement::Flush).
  void Flush();
  void EndFlush();

  std::optional<Offering> NextToHand() override;
  void Handed(TenantId tenant, const Key& key, bool taken) override;
  void SetGroup(TenantId tenant, const Key& key, uint64_t group) override;
  std::optional<Offering> Describe(TenantId tenant, const Key& key) const override;
  TakeOutcome Judge(const Offering& offered, bool evicting) override;
  void Promote(const Offering& offered, std::function<void(bool whole)> done) override;
  void SettleTaken() override;

  const Ghost* FindGhost(TenantId tenant, const Key& key) const { return ghosts_.Find(tenant, key); }
  // The next two do not count as a use.
  const Entry* Peek(TenantId tenant, const Key& key, const TensorShard& shard) const {
    return segments_.Find(tenant, key, shard);
  }
  std::vector<Entry*> PeekAll(TenantId tenant, const Key& key) const { return segments_.All(tenant, key); }
  // Returns the tiers with a whole copy, top to bottom; none for null.
  std::vector<TierKind> Where(const Entry* entry) const;
  Placement& placement() { return placement_; }
  const Placement& placement() const { return placement_; }
  uint64_t objects() const { return objects_; }            // published and found by lookups
  uint64_t object_bytes() const { return object_bytes_; }  // bytes of these objects

 private:
  static constexpr uint32_t kTold = 2;  // uses after which the object is reported
  static constexpr uint32_t kFoundTwice = 2;
  static constexpr size_t kMaxRanks = 1 << 16;

  std::vector<Entry*> Alone() const;  // objects that are only in memory, in the order of Flush
  void Appear(Entry& entry);
  void Reside(Entry& entry) const;
  void Found(Entry& entry, const Query& query);
  void Use(Entry& entry);
  // The level of a rank is the last one at which its engine requested objects; before the first request, the common
  // one.
  using Rank = std::tuple<TenantId, NamespaceId, uint32_t>;
  size_t LevelOf(const Entry& entry) const;
  void Remember(TenantId tenant, const NamespaceId& ns, const TensorShard& shard, size_t level);
  Entry* Living(ObjectId id);  // null if it has ended
  std::vector<ObjectId> IdsOf(TenantId tenant, const Key& key) const;
  bool Expired(const Entry& entry) const;
  void FindExpired(Nanos now);
  // Unlinks the entry with its bundle: an incomplete bundle is useless.
  void Unlink(Entry& entry, MissReason why, PolicyKind policy, TierKind tier);
  void Erase(Entry& entry, MissReason why, PolicyKind policy, TierKind tier);
  void Pin(Entry& entry, Nanos until);
  void Unpin(Entry& entry);
  void Unreference(Entry& entry, bool last);
  bool GoesNow(const Entry& entry) const;  // call for a doomed entry
  static ReuseKind KindOf(const Entry& entry);
  Reuse ReuseOf(const Entry& entry, const Offering& offered) const;
  Entry& Make(const TenantPool& pool, ObjectHeader header, double flops);

  const Clock& clock_;
  Observer& observer_;
  const TellResidence tell_;
  AdmissionPolicy admission_;
  PromotionCosts promotion_;
  ReuseModels reuse_;
  SegmentTable segments_;
  GhostTable ghosts_;
  ObjectId next_id_ = 1;
  absl::btree_map<ObjectId, std::unique_ptr<Entry>>
      entries_;  // all entries, including ended ones still in use; in the order of arrival
  Placement placement_;
  std::map<TenantId, Nanos> ttls_;
  std::map<TenantId, std::list<ObjectId>> by_use_;  // per tenant with a time to live; longest unused first
  std::vector<ObjectId> expiring_;                  // found by the last FindExpired, not yet ended
  // An offered object in flight to this node.
  struct Coming {
    std::vector<Reference> shards;
    std::function<void(bool)> done;
  };
  std::list<Coming> coming_;
  std::vector<ObjectId> to_hand_;  // in ascending order of value
  bool flushing_ = false;
  std::set<std::pair<Nanos, ObjectId>> pins_;  // pins with an end, by end
  std::map<Rank, size_t> levels_;              // per rank, if there are several GPUs
  uint64_t objects_ = 0;
  uint64_t object_bytes_ = 0;
  bool closed_ = false;
};

}  // namespace ashlar::storage
