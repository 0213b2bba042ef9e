// SPDX-License-Identifier: Apache-2.0
// ObjectTable: the objects of all tenants. It finds them by key, counts their references, and ends them for a reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "storage/executor.h"
#include "storage/history/explanation.h"
#include "storage/history/ghost_table.h"
#include "storage/objects/entry.h"
#include "storage/objects/levels.h"
#include "storage/objects/lifetimes.h"
#include "storage/objects/object_index.h"
#include "storage/objects/placement.h"
#include "storage/objects/rank_levels.h"
#include "storage/observer.h"
#include "storage/policy/admission.h"
#include "storage/policy/promotion.h"
#include "storage/slice.h"
#include "storage/tier/tiers.h"

namespace ashlar::storage {

// Where an object of this node is.
struct Residence {
  TierKind nearest = TierKind::kNone;  // the first tier that has a whole copy; kNone: no tier has one any more
  bool saved = false;                  // a disk has a whole copy
  uint32_t uses = 0;                   // lookups that found it
  TierKind told = TierKind::kNone;     // what the last call returned
  TierKind was = TierKind::kNone;      // `nearest` at the last call
  uint8_t level = 0, was_level = 0;    // of `nearest` and `was`, in Tiers::memory: which of several GPUs' tiers
};

// The progress of a walk through all objects that reports their residences again.
struct Telling {
  bool lost = false;             // the other side has lost what it was told
  ObjectId after = 0, last = 0;  // the last object reported, and the last one to report; 0: the walk has not begun
};

using TellResidence = std::function<TierKind(const TenantPool&, const ObjectHeader&, const Residence&)>;

struct ObjectTableOptions {
  size_t ghosts_per_tenant = GhostTable::kDefaultGhosts;
  AdmissionMode admission = AdmissionMode::kSecondUse;  // of the disk
  size_t admission_keys = 1 << 20;                      // whose uses are counted
  EvictionMode eviction = EvictionMode::kPrice;
  // Called when the nearest tier of an object changes, when a disk has a copy of it, and when it is found for the
  // second time. Returns what it has announced: kNone, or the tier. Must not call the table. May be empty.
  TellResidence residence;
  CopyTransitionCounts* copy_transitions = nullptr;  // counts the transitions of copies; null: nobody counts
};

// Keeps two promises: an object that is referenced stays where it is, and one that is neither referenced nor pinned
// does not block an allocation, except while a copy of it is on its way between tiers.
class ObjectTable final : private ObjectEvents {
 public:
  ObjectTable(ObjectTableOptions options, const Tiers& tiers, Executor& copying, const Clock& clock,
              Observer& observer);

  // A use of an object. While the reference lives, the header stays, and the copy at its level: the tier that the
  // engine lands from and maps. Must not outlive the table.
  class Reference {
   public:
    Reference() = default;
    Reference(Reference&& other) noexcept;
    Reference& operator=(Reference&& other) noexcept;
    ~Reference();

    Reference Share() const;  // another use of the same copy
    explicit operator bool() const { return entry_ != nullptr; }
    const Entry* operator->() const { return entry_; }
    const Entry& operator*() const { return *entry_; }
    size_t level() const { return level_; }
    const Copy& copy() const { return entry_->copies[level_]; }
    const Tier& tier() const { return entry_->table->levels_.TierAt(level_); }

   private:
    friend class ObjectTable;
    Reference(Entry& entry, size_t level);
    Entry* entry_ = nullptr;
    uint8_t level_ = 0;
  };

  struct Result {
    MissReason reason = MissReason::kNone;  // kNone: `object` is set
    TierKind tier = TierKind::kNone;        // where it was found
    Reference object;
  };
  // Finds a published object, and counts as its use. An object that the level lacks is brought there (WhenLoaded); the
  // object that is needed first is promoted first. If promoting and landing would take longer than computing, the
  // result is a miss, kSlowerThanRecompute. A shard of a bundle is found if all shards are there; references to the
  // others, at the levels of their ranks, are added to `others`. kWhereItLies: for another node, each object at the
  // level that has it (Levels::WhereItLies).
  static constexpr size_t kWhereItLies = SIZE_MAX;
  Result Find(TenantId tenant, const Query& query, std::vector<Reference>* others = nullptr, size_t level = 0);
  // Returns another shard of an object's bundle, at the level of its rank; empty if it is not there, or the object is
  // gone.
  Reference Shard(const Reference& object, const TensorShard& shard);
  // Returns another shard at this level, and brings it there for a rank of an engine on that level. A miss if there is
  // no space.
  Result ShardAt(const Reference& object, const TensorShard& shard, size_t level);
  Reference Refer(Entry& entry, size_t level) { return Reference(entry, level); }

  struct Room {
    ReserveOutcome outcome = ReserveOutcome::kNoSpace;
    Reference object;  // set when granted
  };
  // Keeps a reserved object from the disk, whatever admission says: for checkpoints that are not worth writing yet. It
  // is written in a drain, once a query that finds it does not defer it, or once it was found kFoundTwice times. All
  // shards of a bundle follow the first one. No effect where objects are never deferred: without a disk, or if its
  // admission takes everything.
  void Defer(TenantId tenant, const Key& key, const TensorShard& shard);
  // Returns whether the disk has the object, or is being given it.
  bool IsSaved(TenantId tenant, const Key& key, const TensorShard& shard) const {
    const Entry* const entry = index_.keys().Find(tenant, key, shard);
    return entry != nullptr && levels_.OnDisk(*entry);
  }
  bool defers() const { return levels_.ssd() != nullptr && admission_.mode() != AdmissionMode::kAll; }

  // Allocates space at the level for a new object, in place of idle ones (Level::Allocate). The object is the caller's
  // alone until Publish; if its last reference ends before, it is abandoned. An object that would take longer to land
  // than `recompute` (0: unknown) is declined. `flops`: the FLOPs that a hit saves (0: unknown, they are estimated).
  Room Reserve(const TenantPool& pool, const ObjectHeader& plan, Nanos recompute = 0, double flops = 0,
               size_t level = 0);
  // `header` is the plan, or one with other forms that takes no more extents, with its checksums. Extents that it does
  // not need are given back. Lookups find the object from now on.
  void Publish(const Reference& object, ObjectHeader header);
  // Ends the object and the other shards of its bundle: lookups do not find them any more; the bytes stay until the
  // last reference ends. No effect if the object is gone.
  void Drop(const Reference& object, MissReason why, PolicyKind policy = PolicyKind::kNone);

  // Calls `call` once the first `bytes` of the reference's copy are there, or once they will not come (Lost): now, if
  // that is already so.
  void WhenLoaded(const Reference& object, uint64_t bytes, std::function<void()> call);
  // Returns why the missing rest of the reference's copy does not come (Levels::Lost); kNone: it does.
  MissReason Lost(const Reference& object) const { return levels_.Lost(*object.entry_, object.level()); }
  // Records a landing of that number of bytes. `took` excludes the time that it waited for bytes on their way up.
  void Landed(TenantId tenant, uint64_t bytes, Nanos took) { promotion_[tenant].Landed(bytes, took); }

  // Adds an object that a restart found on the disk.
  void Adopt(const TenantPool& pool, ObjectHeader header, Slot slot);
  // Adds an object that another node has (storage/tier/remote_source.h): lookups find it, and bring it up from there;
  // `cost` estimates how long that takes (0: unknown). False: the object is here already, and the copy is not taken.
  bool AdoptRemote(const TenantPool& pool, ObjectHeader header, RemoteCopyId copy, Nanos cost);
  // Ends an adopted object without references. No effect on other objects.
  void SettleRemote(TenantId tenant, const Key& key, const TensorShard& shard);
  // Reports the residence of all objects again, a step of the slice each. False: call again.
  bool TellAll(Telling& telling, Slice& slice);

  // These act on all objects of a key; false: there is none.
  //
  // Pin: until `until` (0: no end) one copy stays in some tier, whoever needs the space. A second pin replaces the
  // first. Evict: the object leaves all tiers; leased bytes leave with their leases.
  bool Pin(TenantId tenant, const Key& key, Nanos until);
  bool Unpin(TenantId tenant, const Key& key);
  bool Evict(TenantId tenant, const Key& key);
  // Ends the objects of a key; a referenced or pinned one ends with its last use. A Reserve meanwhile keeps it.
  void GiveUp(TenantId tenant, const Key& key);
  // Ends an object with its bundle and leaves nothing of it: its bytes on a disk are overwritten, and it has no ghost.
  // An object that is being published ends as soon as it is published. No effect if it is gone.
  void Erase(ObjectId id);
  // Returns whether the disk still has something of an object that is gone. Shred also has that overwritten.
  bool OnDisk(ObjectId id) const;
  bool Shred(ObjectId id);

  // Objects of this tenant expire when they were not used for `ttl` (0: never).
  void SetTimeToLive(TenantId tenant, Nanos ttl);
  // Ends pins and expires objects, a step of the slice each, and continues copies that found no space. False: call
  // again.
  bool Tick(Slice& slice);
  // Leaves the cache as it is, as when a process is killed: references that end after this end no objects.
  void Close() { closed_ = true; }

  ObjectIndex& index() { return index_; }
  const ObjectIndex& index() const { return index_; }
  Levels& levels() { return levels_; }
  const Levels& levels() const { return levels_; }
  Placement& placement() { return placement_; }
  const RankLevels& ranks() const { return ranks_; }
  ReuseModels& reuse() { return reuse_; }
  GhostTable& ghosts() { return ghosts_; }
  const GhostTable& ghosts() const { return ghosts_; }
  uint64_t objects() const { return objects_; }            // published, and not gone
  uint64_t object_bytes() const { return object_bytes_; }  // theirs

  static constexpr uint32_t kTold = 2;  // uses after which `residence` is told again
  static ReuseKind KindOf(const Entry& entry);

 private:
  static constexpr uint32_t kFoundTwice = 2;

  void Lost(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) override;
  void Vacated(Entry& entry) override { index_.Delete(entry.id); }
  void Resides(Entry& entry) override;

  Entry& Make(const TenantPool& pool, ObjectHeader header, double flops);
  void Appear(Entry& entry);
  void Found(Entry& entry, const Query& query);
  void Pin(Entry& entry, Nanos until);
  void Unpin(Entry& entry);
  void Unreference(Entry& entry, bool last);
  // Ends the entry, or the entry and its bundle: the rest of a bundle is useless.
  void End(Entry& entry, MissReason why, PolicyKind policy, TierKind tier);
  void EndBundle(Entry& entry, MissReason why, PolicyKind policy, TierKind tier);
  bool MayEnd(const Entry& entry) const;  // nothing of its bundle is in use

  const Clock& clock_;
  Observer& observer_;
  const TellResidence tell_;
  AdmissionPolicy admission_;
  PromotionCosts promotion_;
  ReuseModels reuse_;
  GhostTable ghosts_;
  ObjectIndex index_;
  Lifetimes lifetimes_;
  Levels levels_;
  Placement placement_;
  RankLevels ranks_;
  std::vector<ObjectId> expiring_;  // found by the last tick, and not yet ended
  uint64_t objects_ = 0;
  uint64_t object_bytes_ = 0;
  bool closed_ = false;
};

}  // namespace ashlar::storage
