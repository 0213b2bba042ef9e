// SPDX-License-Identifier: Apache-2.0
// Placement: the copies of objects in the tiers and the transfers between tiers. One level per tier, top to bottom;
// tiers of several GPUs are levels side by side.
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

// Objects are written to a memory tier, and copied to lower tiers as soon as a policy admits them. After an eviction
// above, a lower copy is promoted again. A degraded disk gets no writes and no evictions. Promotion copies and does not
// move, so evicting a copy is free while another one exists.
class Placement {
 public:
  struct Events {
    std::function<Entry*(ObjectId)> find;  // null if it has ended
    // The object's last copy was evicted or cannot be read. Called once; call Discard in response.
    std::function<void(Entry&, MissReason, PolicyKind, TierKind)> lost;
    // A discarded object has no copies and no references left.
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

  // Allocates room in a memory tier for a new object; false if there is none.
  bool Reserve(Entry& entry, size_t level, uint64_t extents);
  // The reserved object was written in the first `header.Extents()` extents; the others are freed.
  void Written(Entry& entry, size_t level);
  // Adds an object of an earlier run, found on the disk.
  void Adopt(Entry& entry, Slot slot);
  // Adds an object of another node. Its remote copy is released once this node has a copy, or once the object has no
  // references and no transfers.
  void AdoptRemote(Entry& entry, RemoteCopyId copy, Nanos cost);
  // Its bytes were wrong when they landed. Informs the source of the remote copy that they came from, if any.
  void Distrust(Entry& entry);
  // Frees the slot of an unwanted object of an earlier run, found on the disk.
  void Forgo(const TenantPool& pool, const Key& key, Slot slot) { disk_->Erase(pool.tenant, key, std::move(slot)); }

  // Ensures that the object's copy in this memory tier is whole or is being filled from the nearest lower copy; a copy
  // that only another GPU has is copied down first. Otherwise returns the reason: kSlowerThanRecompute (promotion and
  // landing would take longer than `recompute`, if that is not 0), kBudgetRefused (no copy there may be evicted) or
  // kTierError (only a stalled disk has it). The caller must hold a reference; the object must be ready and must not
  // have ended. The object with the earliest `needed_at` is promoted first; a time in the past means now.
  struct Recompute {
    Nanos time = 0;       // time to compute the object, compared with any promotion; 0: unknown
    Nanos of_remote = 0;  // time to compute the object, compared with a fetch from another node; 0: unknown
  };
  MissReason Promote(Entry& entry, size_t level, const Recompute& recompute, Nanos needed_at);
  // Calls `call` once the first `extents` of the copy are whole, or when waiting is useless (Lost). Calls immediately
  // if that is already so.
  void WhenLoaded(Entry& entry, size_t level, uint64_t extents, std::function<void()> call);
  // Returns why the missing extents of the copy will not arrive: the object has ended, or the disk is stalled. kNone:
  // they will, or none is missing.
  MissReason Lost(const Entry& entry, size_t level) const;
  // Returns whether only a stalled disk has the object.
  bool OnStalledDisk(const Entry& entry) const;

  // Touch: the object was looked up or reserved again. Touched: a use ended. Changed: its references or pins have
  // changed.
  void Touch(Entry& entry);
  void Touched(Entry& entry);
  void Changed(Entry& entry);
  // Ends the object's copies as soon as they are unused; then calls `vacated`, possibly before this returns.
  void Discard(Entry& entry);

  // Hold keeps a whole copy on this node in place for a reader until LetGo. Copies in a GPU's memory cannot be held.
  // Returns false, without a hold, if the copy is not whole.
  bool Hold(Entry& entry, size_t level);
  void LetGo(Entry& entry, size_t level);
  // A copy without holds differs from what was published, or cannot be read. The copy ends; the object ends too if this
  // was its last copy or one in use.
  void Damaged(Entry& entry, size_t level, MissReason why);
  // Counts a copy that a tier could not read.
  void Unreadable(TenantId tenant, size_t level, const absl::Status& error) {
    observer_.TierError(tenant, kind(level), error);
  }
  const Slot& SlotOf(const Entry& entry, size_t level) const { return entry.copies[level].slot; }
  bool IsDisk(size_t level) const { return level == disk_level_; }
  bool has_disk() const { return disk_ != nullptr; }
  const Tier& TierAt(size_t level) const { return levels_[level]->tier(); }
  // Returns whether bytes of the object are on the disk or being written there.
  bool OnDisk(const Entry& entry) const {
    return disk_ != nullptr && entry.copies[disk_level_].state != Copy::State::kNone;
  }

  // Continues work that found no room. Call it regularly.
  void Pump();
  // Continues copies that found no room. Call it regularly.
  void Tick();

  // Until EndFlush, writes objects that are only in memory to the disk, regardless of admission: those of `order`
  // first, then those that become whole. Nothing on the disk is evicted for them, and other objects are not written
  // behind. A degraded disk gets one more try; if it does not recover, nothing is written.
  void Flush(const std::vector<ObjectId>& order);
  void EndFlush() { flushing_ = false; }
  // Returns whether the disk has a copy of it or is writing one.
  bool Saving(const Entry& entry) const;
  // `hand` of an object has changed.
  void HandChanged(Entry& entry);
  // Returns whether the common level has room for a new object (Level::HasRoomFor).
  bool HasRoomFor(const Entry& coming, uint64_t extents, bool evicting) {
    return levels_[common_]->HasRoomFor(coming, extents, evicting);
  }
  // Objects that are only in memory. `writing`: some of them are being written to the disk, or are queued for it.
  struct Unsaved {
    uint64_t objects = 0, bytes = 0;
    bool writing = false;
  };
  Unsaved unsaved() const;
  PoolShares pools() const;

  size_t levels() const { return levels_.size(); }  // levels on this node
  TierKind kind(size_t level) const { return level == remote_level_ ? TierKind::kRemote : levels_[level]->kind(); }
  size_t common() const { return common_; }  // the default level
  size_t beside() const { return beside_; }  // number of levels side by side at the top
  size_t memory() const { return memory_; }  // number of levels that engines can map
  // Nearest: tier of the nearest readable copy; kNone if there is none. NearestTo: searches from a level down, then
  // elsewhere.
  TierKind Nearest(const Entry& entry) const;
  TierKind NearestTo(const Entry& entry, size_t level) const;
  // Returns the level from which the object is sent to another node: the common one, or that of a GPU if only the GPU
  // has it.
  size_t WhereItLies(const Entry& entry) const;
  size_t tier_copies() const { return tier_copies_; }  // copies in flight, including commits

 private:
  Copy& RemoteOf(Entry& entry) const { return entry.copies[remote_level_]; }
  void RemoveRemote(Entry& entry);
  void LeaveRemote(Entry& entry);  // removes it if this node has its own copy and nothing reads the remote one
  // Ends an object that only another node has and nothing waits for. Returns true if it may be vacated.
  bool DropIfRemote(Entry& entry);
  TierCopier::End EndOf(const Entry& entry, size_t level) const;
  // Returns false if there is no room, or if the entry itself was evicted; then it may be vacated.
  bool MakeRoom(Entry& entry, size_t level, uint64_t extents);
  void GiveUp(Entry& entry, size_t level);
  void Remove(Entry& entry, size_t level);
  static constexpr size_t kNowhere = SIZE_MAX;
  size_t Below(size_t level) const { return level < beside_ ? beside_ : level + 1; }
  size_t NearestSource(const Entry& entry,
                       size_t level) const;  // source for a copy to `level`; kNowhere if no lower level has one
  size_t OnAnotherGpu(const Entry& entry, size_t level) const;  // kNowhere if no other GPU has one
  // Starts a copy to the level from any place. Returns false if there is no room.
  bool Fetch(Entry& entry, size_t level);
  bool PromoteFrom(Entry& entry, size_t level, size_t from);  // false if there is no room
  void StartCopy(Entry& entry, size_t from, size_t to, Nanos needed_at);
  // Sets an earlier time of need for the object's promotions.
  void Hasten(Entry& entry, Nanos needed_at);
  static bool CopiedFrom(const Entry& entry, size_t level, size_t source);
  static bool CopiedFromBelow(const Entry& entry, size_t level);
  // Does not call Pump, because the caller may be making room.
  void CancelCopy(Entry& entry, size_t level);
  void DoneReading(Entry& entry, size_t level);
  void Break(Entry& entry, size_t level);  // marks the copy as unusable; its slot is freed when it has no users
  void CopyProgress(Entry& entry, size_t level, uint64_t loaded);
  void CopyDone(Entry& entry, size_t level, const absl::Status& status);
  void CopyFailed(Entry& entry, size_t level, const absl::Status& status);
  void Committed(Entry& entry, size_t level, const absl::Status& status);
  void BecameWhole(Entry& entry, size_t level);
  void Promoted(const Entry& entry);
  void Refresh(Entry& entry);  // updates the levels
  void Reside(Entry& entry, bool here);
  bool Stalled(const Entry& entry, size_t level) const;  // the copy's source is a stalled disk
  void EndWaits();                                       // ends the waits for such copies
  void CallWaiters(Entry& entry);
  void Vacate(Entry& entry);
  // Copies the object to the lower tiers that should have it. Returns false if there is no room now: try again later.
  bool WriteBehind(Entry& entry);
  // Copies the object in a flush: directly to the disk, from any whole copy, into free room only.
  bool WriteOut(Entry& entry);
  bool WantsBehind(const Entry& entry);
  void QueueBehind(Entry& entry);
  // A tenant's queue of objects to copy down.
  struct Behind {
    std::deque<ObjectId> queue;
    size_t tier_copies = 0;  // copies in flight, including commits
    ObjectId admitted = 0;   // last object that found no room on the disk; possibly being written; not judged again
  };
  void PumpBehind(Behind& behind);
  bool Admits(const Entry& entry, size_t level);

  static constexpr size_t kMaxBehind =
      64;  // background copies in flight per tenant; the fields below are also per tenant
  static constexpr size_t kMaxQueuedBehind = 1 << 16;

  const size_t beside_, common_, memory_;
  SsdTier* const disk_;
  const size_t disk_level_;  // SIZE_MAX if there is no disk
  RemoteSource* const remote_;
  const size_t remote_level_;  // lower than all levels
  TierCopier copier_;
  AdmissionPolicy& admission_;
  PromotionCosts& promotion_;
  const Clock& clock_;
  Observer& observer_;
  const Events events_;
  std::vector<std::unique_ptr<EvictionPolicy>> policies_;
  std::vector<std::unique_ptr<Level>> levels_;
  std::map<TenantId, Behind> behind_;  // never shrinks
  std::multiset<ObjectId> from_disk_;  // copies in flight from the disk
  size_t tier_copies_ = 0;
  bool flushing_ = false;
  uint64_t unsaved_ = 0, unsaved_bytes_ = 0;
};

}  // namespace ashlar::storage
