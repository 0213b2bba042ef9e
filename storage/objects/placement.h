// SPDX-License-Identifier: Apache-2.0
// Placement: the entry point for the copies of objects: reserves, promotes and discards them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/objects/copies.h"
#include "storage/objects/copy_scheduler.h"
#include "storage/objects/entry.h"
#include "storage/objects/levels.h"
#include "storage/observer.h"
#include "storage/policy/admission.h"
#include "storage/policy/promotion.h"

namespace ashlar::storage {

// Objects are written to a memory tier, and copied to the tiers below as soon as a policy admits them. An object that
// was evicted from an upper tier is promoted from a lower one. A degraded disk gets no writes and evicts nothing.
// Promotion copies and never moves, so a copy may be evicted without loss while another copy exists.
class Placement final : private CopyScheduler::Owner {
 public:
  // All arguments must outlive the placement. `copying` runs copies between memory tiers; `promotion` records the
  // measured costs of copies; `transition_counts` may be null.
  Placement(Levels& levels, Executor& copying, AdmissionPolicy& admission, PromotionCosts& promotion,
            const Clock& clock, Observer& observer, const ObjectIndex& index, ObjectEvents& objects,
            CopyTransitionCounts* transition_counts);

  // Reserves space in a memory tier for an object that the caller will write. False: no space.
  bool Reserve(Entry& entry, size_t level, uint64_t extents);
  // The caller has written the reserved object to the first `header.Extents()` extents; the others become free.
  void Written(Entry& entry, size_t level);

  // Makes the object's copy in this memory tier whole, or starts to fill it from the nearest lower copy. An object that
  // only another GPU has is copied down first. If this is not possible, returns the reason: kSlowerThanRecompute
  // (promotion and landing take longer than `recompute`, if that is not 0), kBudgetRefused (no space at the level now,
  // or no readable copy) or kTierError (only a stalled disk has the object). The caller must hold a reference, and the
  // object must be ready and not gone. Objects needed sooner are promoted first; a past `needed_at` means now.
  struct Recompute {
    Nanos time = 0;       // time to compute the object again; 0: unknown
    Nanos of_remote = 0;  // the same if only another node has the object
  };
  MissReason Promote(Entry& entry, size_t level, const Recompute& recompute, Nanos needed_at);
  // Calls `call` when the first `extents` of the copy are loaded or lost (Levels::Lost), at once if they already are.
  // Deletes it without a call when the copy's last user leaves.
  void WhenLoaded(Entry& entry, size_t level, uint64_t extents, std::function<void()> call);

  // Does not write a reserved object to the disk ahead of need, even if admission takes it: for checkpoints that are
  // not worth writing yet. It is written in a drain, after its second hit, or after a hit by a query that does not
  // defer it. All shards of a bundle follow the first one. No effect where objects are never deferred: without a disk,
  // or if its admission takes everything.
  void Defer(Entry& entry) const;
  bool defers() const { return levels_.ssd() != nullptr && admission_.mode() != AdmissionMode::kAll; }

  // The object was looked up, or reserved again.
  void Touch(Entry& entry);
  // Records that a lookup wanted this key, whether it hit or missed.
  void RecordDemand(TenantId tenant, const Key& key) {
    if (defers()) admission_.RecordDemand(tenant, key);
  }
  void EraseEvicted(TenantId tenant) { admission_.EraseEvicted(tenant); }
  // The object's references or pins have changed.
  void Changed(Entry& entry);
  // `transfer` of the object has changed.
  void TransferChanged(Entry& entry);
  // Ends the copies of an object that is gone as soon as nothing uses them, and then vacates the object, possibly
  // before this returns.
  void Discard(Entry& entry);

  // Ends waits for a stalled disk, and retries copies that were waiting for space. Call it periodically.
  void Tick();

  // Reports that a tier failed to read a copy.
  void Unreadable(TenantId tenant, size_t level, const absl::Status& error) {
    observer_.TierError(tenant, levels_.kind(level), error);
  }

  Copies& copies() { return copies_; }
  CopyScheduler& scheduler() { return scheduler_; }
  size_t copies_under_way() const { return scheduler_.under_way(); }
  // Counts objects that only memory has. `writing`: some of them are being written to the disk, or wait for it.
  struct MemoryOnly {
    uint64_t objects = 0, bytes = 0;
    bool writing = false;
  };
  MemoryOnly memory_only() const { return {copies_.memory_only(), copies_.memory_only_bytes(), scheduler_.writing()}; }

 private:
  bool CopyDown(Entry& entry, size_t from, size_t to) override;
  void Loaded(Entry& entry, size_t level, uint64_t loaded) override;
  void Ended(Entry& entry, size_t level, const absl::Status& status) override;

  // Start a copy of the object to `level`, from the nearest copy or from level `from`. False: no space.
  bool Fetch(Entry& entry, size_t level);
  bool FetchFrom(Entry& entry, size_t level, size_t from);
  void StartCopy(Entry& entry, size_t from, size_t to, Nanos needed_at);
  void Failed(Entry& entry, size_t level, const absl::Status& status);
  void Committed(Entry& entry, size_t level, const absl::Status& status);
  void BecameWhole(Entry& entry, size_t level, std::optional<CopyEvent> event);
  void Measure(const Entry& entry);
  void CallWaiters(Entry& entry);

  Levels& levels_;
  AdmissionPolicy& admission_;
  PromotionCosts& promotion_;
  const Clock& clock_;
  Observer& observer_;
  const ObjectIndex& index_;
  ObjectEvents& objects_;
  Copies copies_;
  CopyScheduler scheduler_;
};

}  // namespace ashlar::storage
