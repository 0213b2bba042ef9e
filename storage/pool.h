// The public pool: published objects of all tenants in one tier, their references, and who goes when space is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "storage/executor.h"
#include "storage/index/ghost_table.h"
#include "storage/index/segment_table.h"
#include "storage/observer.h"
#include "storage/policy/eviction.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// Keeps two promises: an object that is referenced stays where it is, and one that is not never blocks an allocation.
class Pool {
 public:
  Pool(Tier& tier, EvictionPolicy& policy, size_t ghosts_per_tenant, const Clock& clock, Observer& observer);
  ~Pool();

  // One use of an object: while it lives, header and slot stay. Must not outlive the pool.
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
    Reference object;
  };
  // Finds a published object and counts as its use.
  Result Find(TenantId tenant, const Key& key);

  struct Room {
    ReserveOutcome outcome = ReserveOutcome::kNoSpace;
    Reference object;  // set when granted
  };
  // Makes a slot for an object that is not there yet, evicting idle objects of this tenant, oldest first, and only if
  // that is enough. The object is the caller's alone until Publish; if its last reference goes before, it is abandoned.
  Room Reserve(TenantId tenant, const ObjectHeader& plan);
  // `header` is the plan, or one with other forms that takes no more extents, with its checksums. Extents that it does
  // not need are given back. From here on the object is found.
  void Publish(const Reference& object, ObjectHeader header);
  // The object is not found any more; its bytes go with the last reference. Harmless when it is gone already.
  void Drop(const Reference& object, MissReason why);

  const Ghost* FindGhost(TenantId tenant, const Key& key) const { return ghosts_.Find(tenant, key); }
  const Entry* Peek(TenantId tenant, const Key& key) const { return table_.Find(tenant, key); }  // no use of it
  TierKind kind() const { return tier_.kind(); }
  uint64_t objects() const { return objects_; }            // published and found
  uint64_t object_bytes() const { return object_bytes_; }  // of those

 private:
  std::optional<Slot> MakeRoom(TenantId tenant, uint64_t extents);
  void Unlink(Entry& entry, MissReason why, PolicyKind policy = PolicyKind::kNone);
  void Unreference(Entry& entry);
  void Free(Entry& entry);

  Tier& tier_;
  EvictionPolicy& policy_;
  const Clock& clock_;
  Observer& observer_;
  SegmentTable table_;
  GhostTable ghosts_;
  ObjectId next_id_ = 1;
  absl::flat_hash_map<ObjectId, std::unique_ptr<Entry>> entries_;  // in the table, or gone and still referenced
  std::map<TenantId, uint64_t> idle_extents_;                      // of published objects that nobody references
  uint64_t objects_ = 0;
  uint64_t object_bytes_ = 0;
};

}  // namespace ashlar::storage
