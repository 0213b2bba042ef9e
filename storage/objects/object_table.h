// SPDX-License-Identifier: Apache-2.0
// ObjectTable: the objects of all tenants. It finds them by key, counts references, pins them, and ends them for a
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

// Where an object of this node is.
struct Residence {
  TierKind nearest = TierKind::kNone;  // the first tier that has a whole copy; kNone: none has one any more
  bool saved = false;                  // a disk has a whole copy
  uint32_t uses = 0;                   // look-ups that found it
  TierKind told = TierKind::kNone;     // what the last call returned
  TierKind was = TierKind::kNone;      // `nearest` at the last call
  uint8_t level = 0, was_level = 0;    // of `nearest` and `was`, in Tiers::memory: which of several GPUs' tiers
};

// How far a walk through all objects has come that says of each again where it resides.
struct Telling {
  bool lost = false;             // others have lost what they were told
  ObjectId after = 0, last = 0;  // of the last one said, and of the last one to say; 0: the walk has not begun
};

using TellResidence = std::function<TierKind(const TenantPool&, const ObjectHeader&, const Residence&)>;

struct ObjectTableOptions {
  size_t ghosts_per_tenant = GhostTable::kDefaultGhosts;
  AdmissionMode admission = AdmissionMode::kSecondUse;  // of the disk
  size_t admission_keys = 1 << 20;                      // whose uses are counted
  EvictionMode eviction = EvictionMode::kPrice;
  // Is told when the nearest tier of an object changes, when a disk has got it, and when it is found for the second
  // time. Returns what it has told others: kNone, or the tier. It must not call the table. May be empty.
  TellResidence residence;
};

// Keeps two promises: an object that is referenced stays where it is, and one that is neither referenced nor pinned
// never blocks an allocation, but for the moment that a copy of it is on its way between tiers.
class ObjectTable final : public Offers {
 public:
  ObjectTable(ObjectTableOptions options, const Tiers& tiers, Executor& copying, const Clock& clock,
              Observer& observer);
  ~ObjectTable() override;

  // One use of an object: while the reference lives, the header stays, and the copy at its level: in the tier that an
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
    const Tier& tier() const { return entry_->table->placement_.TierAt(level_); }

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
  // Finds a published object, and counts as its use. An object that this level lacks is brought there from then on
  // (WhenLoaded); the object that is needed first is promoted first. If promoting and landing would take longer than
  // computing, the result is a miss, kSlowerThanRecompute. A shard of a bundle is found if all shards are there;
  // references to the others, at the levels of their ranks, are added to `others`. kWhereItLies: for another node, at
  // the common level, or at a GPU's for what lies on a GPU and not there; and so with each of the others.
  static constexpr size_t kWhereItLies = SIZE_MAX;
  Result Find(TenantId tenant, const Query& query, std::vector<Reference>* others = nullptr, size_t level = 0);
  // Returns another shard of an object's bundle, at the level of its rank; empty if it is not there, or the object is
  // gone.
  Reference Shard(const Reference& object, const TensorShard& shard);
  // Returns it at this level, to which it is brought, as a rank of an engine on that level needs it. A miss where there
  // is no room.
  Result ShardAt(const Reference& object, const TensorShard& shard, size_t level);

  struct Room {
    ReserveOutcome outcome = ReserveOutcome::kNoSpace;
    Reference object;  // set when granted
  };
  // A request comes: in requests the table counts how long things are not used.
  void Requested(TenantId tenant) { reuse_.Tick(tenant); }

  // Keeps a reserved object from the disk, whatever admission says: for checkpoints that are not worth writing yet. It
  // is written in a drain, once a query that finds it does not defer it, or once it was found kFoundTwice times. All
  // shards of a bundle follow the first one. Harmless where objects are never deferred: without a disk, or if its
  // admission takes everything.
  void Defer(TenantId tenant, const Key& key, const TensorShard& shard);
  bool defers() const { return placement_.has_disk() && admission_.mode() != AdmissionMode::kAll; }
  // Returns whether the disk has the object, or is being given it.
  bool IsSaved(TenantId tenant, const Key& key, const TensorShard& shard) const {
    const Entry* const entry = Peek(tenant, key, shard);
    return entry != nullptr && placement_.Saving(*entry);
  }

  // Makes room at the level for an object that is not there yet, in place of idle ones (storage/objects/level.h). The
  // object is the caller's alone until Publish; if its last reference ends before, it is abandoned. An object that
  // would take longer to land than `recompute` (0: not known) is declined. `flops`: the FLOPs that a hit saves (0: not
  // known, they are estimated).
  Room Reserve(const TenantPool& pool, const ObjectHeader& plan, Nanos recompute = 0, double flops = 0,
               size_t level = 0);
  // `header` is the plan, or one with other forms that takes no more extents, with its checksums. Extents that it does
  // not need are given back. From here on the object is found.
  void Publish(const Reference& object, ObjectHeader header);
  // Ends the object and the other shards of its bundle: look-ups find them no more; the bytes stay until the last
  // reference ends. Harmless if the object is gone already.
  void Drop(const Reference& object, MissReason why, PolicyKind policy = PolicyKind::kNone);

  // Calls `call` once the first `bytes` of the reference's copy are whole, or they do not come (Lost): now, if so.
  void WhenLoaded(const Reference& object, uint64_t bytes, std::function<void()> call);
  // Returns why what the reference's copy still lacks does not come (Placement::Lost); kNone: it does.
  MissReason Lost(const Reference& object) const { return placement_.Lost(*object.entry_, object.level()); }

  // Reports that so many bytes have landed; `took` excludes the time that the landing waited for bytes on their way up.
  void Landed(TenantId tenant, uint64_t bytes, Nanos took) { promotion_[tenant].Landed(bytes, took); }

  // Takes in an object that a restart found on the disk.
  void Adopt(const TenantPool& pool, ObjectHeader header, Slot slot);

  // Says of all objects again where they reside, a step each; false: there are more, call again.
  bool TellAll(Telling& telling, Slice& slice);

  // Shows the objects that came behind `after` and up to `last`, a step each, published or not, those that are gone and
  // still in use among them, in the order of their coming, until `visit` has enough and returns false. `after` becomes
  // the last one that was shown. Returns false where the slice ended first: call again. What `visit` does may end
  // objects, the shown one too.
  bool Walk(ObjectId& after, ObjectId last, Slice& slice, absl::FunctionRef<bool(Entry&)> visit);
  ObjectId newest() const { return next_id_ - 1; }
  Entry* Find(ObjectId id) { return Living(id); }  // null: it is gone. Counts as no use
  // Ends an object, with its bundle, as an operator who wants nothing of it to stay: its bytes on a disk are
  // overwritten, and no ghost is left. One that is being published ends as soon as it is published. Harmless if it is
  // gone.
  void Erase(ObjectId id);
  // Erases what is remembered of objects that have gone, of a tenant or of one of its namespaces.
  void DropGhosts(TenantId tenant, const NamespaceId* ns) { ghosts_.EraseAll(tenant, ns); }
  // Returns whether something of an object that has ended is on the disk yet, or on its way there; Shred: and has that
  // overwritten.
  bool OnDisk(ObjectId id) const;
  bool Shred(ObjectId id);

  // Takes in an object that another node has (storage/tier/remote_source.h): look-ups find it, and bring it up from
  // there; `cost` estimates how long that takes (0: not known). False: there is such an object already, and the copy
  // is not taken.
  bool AdoptRemote(const TenantPool& pool, ObjectHeader header, RemoteCopyId copy, Nanos cost);
  // Ends an adopted object that nobody refers to. Harmless for any other one.
  void SettleRemote(TenantId tenant, const Key& key, const TensorShard& shard);

  // The next three act on all that is there of a key; false: nothing is.
  //
  // Until `until` (0: for good) one copy stays in some tier, whoever needs the space. A second pin replaces the first.
  bool Pin(TenantId tenant, const Key& key, Nanos until);
  bool Unpin(TenantId tenant, const Key& key);
  // The object leaves all tiers; leased bytes leave with their leases.
  bool Evict(TenantId tenant, const Key& key);
  // Ends the object, as nobody wants it any more; a referenced or pinned one ends with its last use. A Reserve
  // meanwhile finds it there, and keeps it.
  void GiveUp(TenantId tenant, const Key& key);
  // Objects of this tenant expire when they were not used for so long (0: never).
  void SetTimeToLive(TenantId tenant, Nanos ttl);
  // Ends pins and expires objects, a step each, and continues copies that found no room. False: call again.
  bool Tick(Slice& slice);

  // Leaves the cache as it is, as when a process is killed: references that end from now on end no objects.
  void Close() { closed_ = true; }

  // Writes what memory has alone to the disk, what is pinned first, then what is hottest (Placement::Flush).
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
  // These two count as no use.
  const Entry* Peek(TenantId tenant, const Key& key, const TensorShard& shard) const {
    return segments_.Find(tenant, key, shard);
  }
  std::vector<Entry*> PeekAll(TenantId tenant, const Key& key) const { return segments_.All(tenant, key); }
  // The tiers that have a whole copy of it, top to bottom; none of null.
  std::vector<TierKind> Where(const Entry* entry) const;
  Placement& placement() { return placement_; }
  const Placement& placement() const { return placement_; }
  uint64_t objects() const { return objects_; }            // published and found
  uint64_t object_bytes() const { return object_bytes_; }  // of those

 private:
  static constexpr uint32_t kTold = 2;  // uses
  static constexpr uint32_t kFoundTwice = 2;
  static constexpr size_t kMaxRanks = 1 << 16;

  std::vector<Entry*> Alone() const;  // that memory alone has, in the order of Flush
  void Appear(Entry& entry);
  void Reside(Entry& entry) const;
  void Found(Entry& entry, const Query& query);
  void Use(Entry& entry);
  // The level of a rank: the last one at which an engine of it asked; of a rank that never has, the common one.
  using Rank = std::tuple<TenantId, NamespaceId, uint32_t>;
  size_t LevelOf(const Entry& entry) const;
  void Remember(TenantId tenant, const NamespaceId& ns, const TensorShard& shard, size_t level);
  Entry* Living(ObjectId id);  // null: it is gone
  std::vector<ObjectId> IdsOf(TenantId tenant, const Key& key) const;
  bool Expired(const Entry& entry) const;
  void FindExpired(Nanos now);
  // Unlinks the entry with its bundle: the rest of a bundle is of no use.
  void Unlink(Entry& entry, MissReason why, PolicyKind policy, TierKind tier);
  void Erase(Entry& entry, MissReason why, PolicyKind policy, TierKind tier);
  void Pin(Entry& entry, Nanos until);
  void Unpin(Entry& entry);
  void Unreference(Entry& entry, bool last);
  bool GoesNow(const Entry& entry) const;  // if it is doomed
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
  absl::btree_map<ObjectId, std::unique_ptr<Entry>> entries_;  // in the table, or gone and still in use; by coming
  Placement placement_;
  std::map<TenantId, Nanos> ttls_;
  std::map<TenantId, std::list<ObjectId>> by_use_;  // of tenants whose objects expire, the longest unused first
  std::vector<ObjectId> expiring_;                  // found by the last FindExpired, and not yet ended
  // Offered objects on their way here.
  struct Coming {
    std::vector<Reference> shards;
    std::function<void(bool)> done;
  };
  std::list<Coming> coming_;
  std::vector<ObjectId> to_hand_;  // the hottest last
  bool flushing_ = false;
  std::set<std::pair<Nanos, ObjectId>> pins_;  // that end, by when
  std::map<Rank, size_t> levels_;              // of ranks, where there are several GPUs
  uint64_t objects_ = 0;
  uint64_t object_bytes_ = 0;
  bool closed_ = false;
};

}  // namespace ashlar::storage
