// SPDX-License-Identifier: Apache-2.0
// Placement: the copies of objects in the tiers, and their moves between tiers; one level a tier, top to bottom. Tiers
// of several GPUs are levels side by side: none of them is above or below another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "proto/outcome.h"
#include "storage/objects/entry.h"
#include "storage/objects/level.h"
#include "storage/objects/tier_copier.h"
#include "storage/observer.h"
#include "storage/policy/admission.h"
#include "storage/policy/promotion.h"
#include "storage/tier/tiers.h"

namespace ashlar::storage {

// Objects are written in a memory tier, and copied down from there as soon as a policy admits them; what is given up
// above is found below and copied up again. Nothing is written to a disk that is degraded, nor given up there.
// Promotion copies, never moves, so a copy that is given up costs nothing but its place as long as there is another
// one.
class Placement {
 public:
  struct Events {
    std::function<Entry*(ObjectId)> find;  // null: it is gone
    // No tier has the object any more: its last copy was given up, or cannot be read. Called once; answer with Discard.
    std::function<void(Entry&, MissReason, PolicyKind, TierKind)> lost;
    // A discarded object has no copy left, and nobody refers to it.
    std::function<void(Entry&)> vacated;
    // `resides` or `saved` of an object has changed.
    std::function<void(Entry&)> resides;
  };

  // All arguments must outlive the placement. `copying` copies between memory tiers; `promotion` learns the measured
  // costs of copies. `prices`: the cheapest copy is evicted first; null: the least recently used one.
  Placement(const Tiers& tiers, Executor& copying, AdmissionPolicy& admission, PromotionCosts& promotion,
            const ReuseModels* prices, const Clock& clock, Observer& observer, Events events);
  ~Placement();

  void SetFloor(size_t level, const TenantPool& pool, uint64_t bytes) { levels_[level]->SetFloor(pool, bytes); }

  // Room in a memory tier for an object that is to be written there; false: none.
  bool Reserve(Entry& entry, size_t level, uint64_t extents);
  // The reserved object was written, in the first `header.Extents()` extents; the others are given back.
  void Written(Entry& entry, size_t level);
  // Takes in an object that an earlier run left on the disk.
  void Adopt(Entry& entry, Slot slot);
  // Takes in an object that another node has. As soon as this node has a copy the other one is released; so it is where
  // nobody refers to the object and nothing of it is on its way.
  void AdoptRemote(Entry& entry, RemoteCopyId copy, Nanos cost);
  // Its bytes were wrong where they landed: tells the source of the remote copy that they came by, if any.
  void Distrust(Entry& entry);
  // Frees the slot of an object that an earlier run left on the disk and that is not wanted.
  void Forgo(const TenantPool& pool, const Key& key, Slot slot) { disk_->Erase(pool.tenant, key, std::move(slot)); }

  // Makes sure that the object's copy in this memory tier is whole, or is being filled from the nearest copy below;
  // what only another GPU has goes down first. Otherwise returns the reason: kSlowerThanRecompute (promoting and
  // landing take longer than `recompute`, if that is not 0), kBudgetRefused (no copy there may be evicted) or
  // kTierError (only the disk has it, which is stalled). The caller must hold a reference; the object must be ready and
  // not gone. Objects needed sooner are promoted first; a `needed_at` in the past means now.
  struct Recompute {
    Nanos time = 0;       // of computing it again, against any way up; 0: not known
    Nanos of_remote = 0;  // likewise, against the way from another node
  };
  MissReason Promote(Entry& entry, size_t level, const Recompute& recompute, Nanos needed_at);
  // Calls `call` once the first `extents` of the copy there are whole, or once nobody should wait for them (Lost): at
  // once if that is already so.
  void WhenLoaded(Entry& entry, size_t level, uint64_t extents, std::function<void()> call);
  // Returns why what the copy there still lacks does not come: the object is gone, or the disk is stalled. kNone: it
  // comes, or nothing is missing.
  MissReason Lost(const Entry& entry, size_t level) const;
  // Returns whether only the disk has the object, which is stalled.
  bool OnStalledDisk(const Entry& entry) const;

  // The object was looked up or reserved again; it was in use until now; its references or pins have changed.
  void Touch(Entry& entry);
  void Touched(Entry& entry);
  void Changed(Entry& entry);
  // Ends the object's copies as soon as nothing uses them; then the object is `vacated`, perhaps before this returns.
  void Discard(Entry& entry);

  // Holds a whole copy on this node for somebody who reads it, and lets it go again: meanwhile it stays where it is. No
  // copy in a GPU's memory is held. False: it is not whole, and not held.
  bool Hold(Entry& entry, size_t level);
  void LetGo(Entry& entry, size_t level);
  // What is there of the copy, which nobody holds any more, is not what was published, or cannot be read: it goes, and
  // with the last copy, or one that is in use, the object.
  void Damaged(Entry& entry, size_t level, MissReason why);
  // Counts a copy that a tier could not read.
  void Unreadable(TenantId tenant, size_t level, const absl::Status& error) {
    observer_.TierError(tenant, kind(level), error);
  }
  const Slot& SlotOf(const Entry& entry, size_t level) const { return entry.copies[level].slot; }
  bool IsDisk(size_t level) const { return level == disk_level_; }
  bool has_disk() const { return disk_ != nullptr; }
  const Tier& TierAt(size_t level) const { return levels_[level]->tier(); }
  // Returns whether something of the object is on the disk yet, or on its way there.
  bool OnDisk(const Entry& entry) const {
    return disk_ != nullptr && entry.copies[disk_level_].state != Copy::State::kNone;
  }

  // Goes on with what found no room. Call it now and then.
  void Pump();
  // Continues copies that found no room. Call it now and then.
  void Tick();

  // Until EndFlush: writes the objects that memory alone has to the disk, whatever admission says, first those of
  // `order`, then those that become whole. No object on the disk is given up for them, and no other object is written
  // behind. A degraded disk is tried once more; nothing is written if it does not recover.
  void Flush(const std::vector<ObjectId>& order);
  void EndFlush() { flushing_ = false; }
  // The disk has a copy of it, or is being given one.
  bool Saving(const Entry& entry) const;
  // `hand` of an object has changed.
  void HandChanged(Entry& entry);
  // Returns whether the common level has room for a coming object (Level::HasRoomFor).
  bool HasRoomFor(const Entry& coming, uint64_t extents, bool evicting) {
    return levels_[common_]->HasRoomFor(coming, extents, evicting);
  }
  // Objects that memory alone has. writing: some of them are being written to the disk, or wait for it.
  struct Unsaved {
    uint64_t objects = 0, bytes = 0;
    bool writing = false;
  };
  Unsaved unsaved() const;
  PoolShares pools() const;

  size_t levels() const { return levels_.size(); }  // of this node
  TierKind kind(size_t level) const { return level == remote_level_ ? TierKind::kRemote : levels_[level]->kind(); }
  size_t common() const { return common_; }  // the level of those that say none
  size_t beside() const { return beside_; }  // levels that stand side by side, at the top
  size_t memory() const { return memory_; }  // levels that engines can map
  // The nearest copy that can be read; kNone where there is none yet. `NearestTo` a level: there, below, or elsewhere.
  TierKind Nearest(const Entry& entry) const;
  TierKind NearestTo(const Entry& entry, size_t level) const;
  // The level that another node is sent it from: the common one, or a GPU's that has it where the common one has not.
  size_t WhereItLies(const Entry& entry) const;
  size_t tier_copies() const { return tier_copies_; }  // under way, commits among them

 private:
  Copy& RemoteOf(Entry& entry) const { return entry.copies[remote_level_]; }
  void RemoveRemote(Entry& entry);
  void LeaveRemote(Entry& entry);  // removes it where this node has a copy of its own and nothing reads the other
  // Ends an object that only another node has, and that nobody waits for. True: it may be vacated.
  bool DropIfRemote(Entry& entry);
  TierCopier::End EndOf(const Entry& entry, size_t level) const;
  // False: there is none, or the entry went for it; then it may be vacated.
  bool MakeRoom(Entry& entry, size_t level, uint64_t extents);
  void GiveUp(Entry& entry, size_t level);
  void Remove(Entry& entry, size_t level);
  static constexpr size_t kNowhere = SIZE_MAX;
  size_t Below(size_t level) const { return level < beside_ ? beside_ : level + 1; }
  size_t NearestSource(const Entry& entry, size_t level) const;  // of the copy there; kNowhere: there is none below
  size_t OnAnotherGpu(const Entry& entry, size_t level) const;   // kNowhere: no copy is
  // Has the object brought to the level from wherever it is. False: no room.
  bool Fetch(Entry& entry, size_t level);
  bool PromoteFrom(Entry& entry, size_t level, size_t from);  // false: no room there
  void StartCopy(Entry& entry, size_t from, size_t to, Nanos needed_at);
  // Moves the object's copies on the way up to an earlier time of need.
  void Hasten(Entry& entry, Nanos needed_at);
  static bool CopiedFrom(const Entry& entry, size_t level, size_t source);
  static bool CopiedFromBelow(const Entry& entry, size_t level);
  // Does not pump: a caller that is making room must not start to make more.
  void CancelCopy(Entry& entry, size_t level);
  void DoneReading(Entry& entry, size_t level);
  void Break(Entry& entry, size_t level);  // its bytes are no copy; the slot is freed when nobody uses it
  void CopyProgress(Entry& entry, size_t level, uint64_t loaded);
  void CopyDone(Entry& entry, size_t level, const absl::Status& status);
  void CopyFailed(Entry& entry, size_t level, const absl::Status& status);
  void Committed(Entry& entry, size_t level, const absl::Status& status);
  void BecameWhole(Entry& entry, size_t level);
  void Promoted(const Entry& entry);
  void Refresh(Entry& entry);  // tells the levels about its copies
  void Reside(Entry& entry, bool here);
  bool Stalled(const Entry& entry, size_t level) const;  // the copy there comes from a disk that is stalled
  void EndWaits();                                       // of those who wait for such copies
  void CallWaiters(Entry& entry);
  void Vacate(Entry& entry);
  // Copies the object to the lower tiers that should have it. False: try again when there is room.
  bool WriteBehind(Entry& entry);
  // Copies the object during a flush: straight to the disk, from any whole copy, into free room.
  bool WriteOut(Entry& entry);
  bool WantsBehind(const Entry& entry);
  void QueueBehind(Entry& entry);
  // A tenant's objects that are to be copied down.
  struct Behind {
    std::deque<ObjectId> queue;
    size_t tier_copies = 0;  // under way, commits among them
    ObjectId admitted = 0;   // the last one that found no room on the disk, which may be on its way: not judged again
  };
  void PumpBehind(Behind& behind);
  bool Admits(const Entry& entry, size_t level);

  static constexpr size_t kMaxBehind = 64;  // copies that nobody waits for, at a time: of a tenant, as all below
  static constexpr size_t kMaxQueuedBehind = 1 << 16;

  const size_t beside_, common_, memory_;
  SsdTier* const disk_;
  const size_t disk_level_;  // SIZE_MAX: none
  RemoteSource* const remote_;
  const size_t remote_level_;  // below all levels
  TierCopier copier_;
  AdmissionPolicy& admission_;
  PromotionCosts& promotion_;
  const Clock& clock_;
  Observer& observer_;
  const Events events_;
  std::vector<std::unique_ptr<EvictionPolicy>> policies_;
  std::vector<std::unique_ptr<Level>> levels_;
  std::map<TenantId, Behind> behind_;  // none is ever erased
  std::multiset<ObjectId> from_disk_;  // of copies from the disk that are under way
  size_t tier_copies_ = 0;
  bool flushing_ = false;
  uint64_t unsaved_ = 0, unsaved_bytes_ = 0;
};

}  // namespace ashlar::storage
