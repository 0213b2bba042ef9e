// SPDX-License-Identifier: Apache-2.0
// Placement: which copies of an object there are, in which tiers, and when they come and go.
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

// Objects are written in a memory tier, and copied down from there as soon as a policy admits them; what is evicted
// above is found below and copied up again. Nothing is written to a degraded disk, and nothing evicted there. Promotion
// copies, never moves, so evicting a copy costs nothing but its space while there is another one.
class Placement final : private CopyScheduler::Owner {
 public:
  // All arguments must outlive the placement. `copying` copies between memory tiers; `promotion` learns the measured
  // costs of copies; `taken` counts the transitions of copies (may be null).
  Placement(Levels& levels, Executor& copying, AdmissionPolicy& admission, PromotionCosts& promotion,
            const Clock& clock, Observer& observer, const ObjectIndex& index, ObjectEvents& objects,
            CopyTransitionCounts* taken);

  // Space in a memory tier for an object that is to be written there; false: none.
  bool Reserve(Entry& entry, size_t level, uint64_t extents);
  // The reserved object was written, in the first `header.Extents()` extents; the others are given back.
  void Written(Entry& entry, size_t level);

  // Makes sure that the object's copy in this memory tier is whole, or is being filled from the nearest copy below;
  // what only another GPU has goes down first. Otherwise returns the reason: kSlowerThanRecompute (promoting and
  // landing take longer than `recompute`, if that is not 0), kBudgetRefused (no copy there may be evicted) or
  // kTierError (only the disk has it, which is stalled). The caller must hold a reference; the object must be ready and
  // not gone. Objects needed sooner are promoted first; a `needed_at` in the past means now.
  struct Recompute {
    Nanos time = 0;       // to compute it again, against any way up; 0: unknown
    Nanos of_remote = 0;  // likewise, against the way from another node
  };
  MissReason Promote(Entry& entry, size_t level, const Recompute& recompute, Nanos needed_at);
  // Calls `call` once the first `extents` of the copy are there, or once they will not come (Levels::Lost): at once if
  // that is already so.
  void WhenLoaded(Entry& entry, size_t level, uint64_t extents, std::function<void()> call);

  // The object was looked up, or reserved again.
  void Touch(Entry& entry);
  // The object's references or pins have changed.
  void Changed(Entry& entry);
  // `transfer` of the object has changed.
  void TransferChanged(Entry& entry);
  // Ends the copies of an object that is gone, as soon as nothing uses them; then it is vacated, perhaps before this
  // returns.
  void Discard(Entry& entry);

  // Ends waits for a stalled disk, and continues copies that found no space. Call it periodically.
  void Tick();

  // Counts a copy that a tier could not read.
  void Unreadable(TenantId tenant, size_t level, const absl::Status& error) {
    observer_.TierError(tenant, levels_.kind(level), error);
  }

  Copies& copies() { return copies_; }
  CopyScheduler& scheduler() { return scheduler_; }
  size_t copies_under_way() const { return scheduler_.under_way(); }
  // Objects that only memory has. writing: some of them are being written to the disk, or wait for it.
  struct Unsaved {
    uint64_t objects = 0, bytes = 0;
    bool writing = false;
  };
  Unsaved unsaved() const { return {copies_.unsaved(), copies_.unsaved_bytes(), scheduler_.writing()}; }

 private:
  bool CopyDown(Entry& entry, size_t from, size_t to) override;
  void Loaded(Entry& entry, size_t level, uint64_t loaded) override;
  void Ended(Entry& entry, size_t level, const absl::Status& status) override;

  // Have the object brought to the level, from the nearest copy or from a given level. False: no space.
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
