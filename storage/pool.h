// The objects of all tenants: found by key, referenced, pinned, and gone for a reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "storage/entry.h"
#include "storage/executor.h"
#include "storage/index/ghost_table.h"
#include "storage/index/segment_table.h"
#include "storage/observer.h"
#include "storage/placement.h"
#include "storage/policy/admission.h"
#include "storage/policy/bring_up.h"
#include "storage/tier/tiers.h"

namespace ashlar::storage {

struct PoolOptions {
  size_t ghosts_per_tenant = GhostTable::kDefaultGhosts;
  AdmissionMode admission = AdmissionMode::kSecondUse;  // of the disk
  size_t admission_keys = 1 << 20;                      // whose uses are counted
};

// Keeps two promises: an object that is referenced stays where it is, and one that is neither referenced nor pinned
// never blocks an allocation, but for the moment that a copy of it is on its way between tiers.
class Pool {
 public:
  Pool(PoolOptions options, const Tiers& tiers, Executor& copying, const Clock& clock, Observer& observer);
  ~Pool();

  // One use of an object: while it lives, the header and the copy at the top stay. Must not outlive the pool.
  class Reference {
   public:
    Reference() = default;
    Reference(Reference&& other) noexcept;
    Reference& operator=(Reference&& other) noexcept;
    ~Reference();

    Reference Share() const;  // another use of the same object
    explicit operator bool() const { return entry_ != nullptr; }
    const Entry* operator->() const { return entry_; }
    const Entry& operator*() const { return *entry_; }

   private:
    friend class Pool;
    Reference(Pool& pool, Entry& entry);
    Pool* pool_ = nullptr;
    Entry* entry_ = nullptr;
  };

  struct Result {
    MissReason reason = MissReason::kNone;  // kNone: `object` is set
    TierKind tier = TierKind::kNone;        // where it was found
    Reference object;
  };
  // Finds a published object and counts as its use. What only lower tiers have is on its way up from then on
  // (WhenLoaded).
  // What would take longer to come up and land than `recompute` (0: not known) is a miss, kTooDear.
  // `needed_at`: of what comes up, that is first which is needed first.
  Result Find(TenantId tenant, const Key& key, Nanos recompute = 0, Nanos needed_at = 0);

  struct Room {
    ReserveOutcome outcome = ReserveOutcome::kNoSpace;
    Reference object;  // set when granted
  };
  // Makes room at the top for an object that is not there yet, in place of idle ones (storage/level.h). The object is
  // the caller's alone until Publish; if its last reference goes before, it is abandoned.
  // What would take longer to land than `recompute` (0: not known) is declined.
  Room Reserve(const Group& group, const ObjectHeader& plan, Nanos recompute = 0);
  // `header` is the plan, or one with other forms that takes no more extents, with its checksums. Extents that it does
  // not need are given back. From here on the object is found.
  void Publish(const Reference& object, ObjectHeader header);
  // The object is not found any more; its bytes go with the last reference. Harmless when it is gone already.
  void Drop(const Reference& object, MissReason why, PolicyKind policy = PolicyKind::kNone);

  // Calls `call` once the first `bytes` of the object's copy at the top are whole, or the object is gone: now, if so.
  void WhenLoaded(const Reference& object, uint64_t bytes, std::function<void()> call);

  // So many bytes have landed; `took` without what the landing waited for bytes on their way up.
  void Landed(uint64_t bytes, Nanos took) { bring_up_.Landed(bytes, took); }

  // An object that a restart found on the disk.
  void Adopt(const Group& group, ObjectHeader header, Slot slot);

  // Until `until` (0: for good) one copy stays in some tier, whoever needs the space. A second pin replaces the first.
  // False: no such object.
  bool Pin(TenantId tenant, const Key& key, Nanos until);
  bool Unpin(TenantId tenant, const Key& key);
  // The object goes from all tiers, leased bytes with their leases. False: no such object.
  bool Evict(TenantId tenant, const Key& key);
  // Objects of this tenant expire when they were not used for so long (0: never).
  void SetTimeToLive(TenantId tenant, Nanos ttl) { ttls_[tenant] = ttl; }
  // Ends pins, expires objects, goes on with copies that found no room.
  void Tick();

  // Writes what memory has alone to the disk, what is pinned first, then what is hottest (Placement::Flush).
  void Flush();

  const Ghost* FindGhost(TenantId tenant, const Key& key) const { return ghosts_.Find(tenant, key); }
  const Entry* Peek(TenantId tenant, const Key& key) const { return table_.Find(tenant, key); }  // no use of it
  Placement& placement() { return placement_; }
  const Placement& placement() const { return placement_; }
  uint64_t objects() const { return objects_; }            // published and found
  uint64_t object_bytes() const { return object_bytes_; }  // of those

 private:
  void Appear(Entry& entry);
  void Use(Entry& entry);
  bool Expired(const Entry& entry) const;
  void Unlink(Entry& entry, MissReason why, PolicyKind policy, TierKind tier);
  void Unreference(Entry& entry);
  Entry& Make(const Group& group, ObjectHeader header);

  const Clock& clock_;
  Observer& observer_;
  AdmissionPolicy admission_;
  BringUpCost bring_up_;
  SegmentTable table_;
  GhostTable ghosts_;
  ObjectId next_id_ = 1;
  absl::flat_hash_map<ObjectId, std::unique_ptr<Entry>> entries_;  // in the table, or gone and still in use
  Placement placement_;
  std::map<TenantId, Nanos> ttls_;
  std::map<TenantId, std::list<ObjectId>> by_use_;  // of tenants whose objects expire, the longest unused first
  std::set<std::pair<Nanos, ObjectId>> pins_;       // that end, by when
  uint64_t objects_ = 0;
  uint64_t object_bytes_ = 0;
};

}  // namespace ashlar::storage
