// SPDX-License-Identifier: Apache-2.0
// ObjectTable: the objects of all tenants: how they appear, and why they end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/executor.h"
#include "storage/history/ghost_table.h"
#include "storage/objects/entry.h"
#include "storage/objects/levels.h"
#include "storage/objects/lifetimes.h"
#include "storage/objects/object_index.h"
#include "storage/objects/object_reference.h"
#include "storage/objects/placement.h"
#include "storage/objects/rank_levels.h"
#include "storage/objects/residences.h"
#include "storage/observer.h"
#include "storage/policy/admission.h"
#include "storage/policy/promotion.h"
#include "storage/tier/tiers.h"

namespace ashlar::storage {

struct ObjectTableOptions {
  size_t ghosts_per_tenant = GhostTable::kDefaultGhosts;
  AdmissionMode admission = AdmissionMode::kSecondUse;  // policy of the disk
  size_t admission_keys = 1 << 20;                      // number of keys whose uses are counted
  EvictionMode eviction = EvictionMode::kPrice;
  ReportResidence residence;
  CopyTransitionCounts* copy_transitions = nullptr;  // counts the transitions of copies; null: not counted
};

// Guarantees that a referenced object stays where it is, and that an object without reference or pin does not block an
// allocation, except while a copy of it moves between tiers.
class ObjectTable final : private ObjectEvents {
 public:
  ObjectTable(ObjectTableOptions options, const Tiers& tiers, Executor& copying, const Clock& clock,
              Observer& observer);

  // Adds an object with neither key nor copies. `flops`: those that a hit saves (0: unknown, they are estimated).
  Entry& Add(const TenantPool& pool, ObjectHeader header, double flops);
  // The object is whole: lookups by its key find it from now on.
  void Appear(Entry& entry);
  // Ends the object and the other shards of its bundle, because the rest of a bundle is useless: lookups do not find
  // them any more; the bytes stay until the last reference ends. `tier`: the nearest that had it.
  void End(Entry& entry, MissReason why, PolicyKind policy, TierKind tier);
  // Ends a referenced object with its bundle. No effect if it is gone.
  void Drop(const ObjectReference& object, MissReason why, PolicyKind policy = PolicyKind::kNone);
  // Ends the objects of a key. A referenced or pinned one ends with its last use, unless it is reserved again.
  void EvictKey(TenantId tenant, const Key& key);
  // Ends an object with its bundle completely: its bytes on a disk are overwritten, and it leaves no ghost. An object
  // that is being published ends as soon as it is published. No effect if it is gone.
  void Erase(ObjectId id);
  void Pin(Entry& entry, Nanos until);  // Lifetimes::Pin
  // A reference to the object has ended. `last`: it was the last one to its copy. Only for ObjectReference.
  void Unreference(Entry& entry, bool last);
  // Simulates a kill: references that end afterwards do not end objects.
  void Close() { closed_ = true; }

  ObjectIndex& index() { return index_; }
  const ObjectIndex& index() const { return index_; }
  Levels& levels() { return levels_; }
  const Levels& levels() const { return levels_; }
  Placement& placement() { return placement_; }
  Lifetimes& lifetimes() { return lifetimes_; }
  RankLevels& ranks() { return ranks_; }
  ReuseModels& reuse() { return reuse_; }
  PromotionCosts& costs() { return promotion_; }
  GhostTable& ghosts() { return ghosts_; }
  const GhostTable& ghosts() const { return ghosts_; }
  const Residences& residences() const { return residences_; }
  Observer& observer() { return observer_; }
  uint64_t objects() const { return objects_; }            // published, and not gone
  uint64_t object_bytes() const { return object_bytes_; }  // bytes of these objects

 private:
  void Lost(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) override { End(entry, why, policy, tier); }
  void Vacated(Entry& entry) override { index_.Delete(entry.id); }
  void Resides(Entry& entry) override { residences_.Report(entry); }

  void EndOne(Entry& entry, MissReason why, PolicyKind policy, TierKind tier);
  bool MayEnd(const Entry& entry) const;  // returns whether nothing of its bundle is in use

  const Clock& clock_;
  Observer& observer_;
  AdmissionPolicy admission_;
  PromotionCosts promotion_;
  ReuseModels reuse_;
  GhostTable ghosts_;
  ObjectIndex index_;
  Residences residences_;
  Lifetimes lifetimes_;
  Levels levels_;
  Placement placement_;
  RankLevels ranks_;
  uint64_t objects_ = 0;
  uint64_t object_bytes_ = 0;
  bool closed_ = false;
};

}  // namespace ashlar::storage
