// SPDX-License-Identifier: Apache-2.0
// CopyScheduler: when objects are copied between tiers. It runs the copies under way, and keeps the queues of objects
// that are to be copied down ahead of need: to the tiers below, and to the disk in a drain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "storage/executor.h"
#include "storage/objects/entry.h"
#include "storage/objects/levels.h"
#include "storage/objects/object_index.h"
#include "storage/objects/tier_copier.h"
#include "storage/policy/admission.h"

namespace ashlar::storage {

class CopyScheduler {
 public:
  // The owner of the copies.
  class Owner {
   public:
    virtual ~Owner() = default;
    // Allocates space at `to` and starts a copy from `from`, for which nobody waits. False: there is no space, or the
    // entry has ended.
    virtual bool CopyDown(Entry& entry, size_t from, size_t to) = 0;
    // The first `loaded` extents of the copy at the level are there.
    virtual void Loaded(Entry& entry, size_t level, uint64_t loaded) = 0;
    // The copy, or the commit, that was started for the level has ended.
    virtual void Ended(Entry& entry, size_t level, const absl::Status& status) = 0;
  };

  // All arguments must outlive the scheduler. `copying` copies between memory tiers.
  CopyScheduler(Levels& levels, Executor& copying, AdmissionPolicy& admission, const ObjectIndex& index, Owner& owner);

  // Starts to copy the object; the space is there. `needed_at`: TierCopier's. No event comes before this returns.
  void Start(Entry& entry, size_t from, size_t to, Nanos needed_at);
  // Has the disk acknowledge the copy that was written there.
  void Commit(Entry& entry);
  // Moves the object's copies on the way up to an earlier time of need.
  void Hasten(Entry& entry, Nanos needed_at);
  // More of the source of the copy at the level is there.
  void Offer(Entry& entry, size_t level, uint64_t loaded);
  // Ends the copy at the level. It has `Ended` before this returns if no piece is in flight, and otherwise later. Does
  // not pump: a caller that frees space must not start to use it.
  void Cancel(Entry& entry, size_t level);

  // Queues the object if a tier below should have a copy of it.
  void QueueDown(Entry& entry);
  // Until EndFlush: writes objects that only memory has to the disk, whatever admission says, first those of `order`,
  // then those that become whole. No object on the disk is evicted for them, and nothing else is copied down. A
  // degraded disk is tried once more; nothing is written if it does not recover.
  void Flush(const std::vector<ObjectId>& order);
  void EndFlush() { flushing_ = false; }
  bool flushing() const { return flushing_; }

  // Starts what was waiting for space or for an executor. Call it periodically. PumpCopies: only copies under way.
  void Pump();
  void PumpCopies() { copier_.Pump(); }

  size_t under_way() const { return under_way_; }  // copies between tiers, commits among them
  bool writing() const;                            // some copies down are under way or wait, and the disk answers
  std::vector<ObjectId> from_disk() const { return {from_disk_.begin(), from_disk_.end()}; }
  // Returns whether bytes of other nodes reach the level without a copy in CPU memory.
  bool ReadsStraightTo(size_t level) const { return copier_.ReadsStraightTo(levels_.TierAt(level)); }

 private:
  // A tenant's objects that are to be copied down.
  struct Queue {
    std::deque<ObjectId> objects;
    size_t under_way = 0;   // copies and commits that nobody waits for
    ObjectId admitted = 0;  // the last object that found no space on the disk; it is not judged again
  };

  TierCopier::End EndOf(const Entry& entry, size_t level) const;
  void Done(Entry& entry, size_t level, const absl::Status& status);
  bool WantsCopyDown(const Entry& entry);
  bool Admits(const Entry& entry, size_t level);
  // These two return false if the object should be tried again once there is space.
  bool CopyDown(Entry& entry);
  bool CopyToDisk(Entry& entry);  // in a flush: from any whole copy, into free space
  void Pump(Queue& queue);

  static constexpr size_t kMaxIdleCopies = 64;  // of a tenant, that nobody waits for
  static constexpr size_t kMaxQueued = 1 << 16;

  Levels& levels_;
  SsdTier* const ssd_;
  TierCopier copier_;
  AdmissionPolicy& admission_;
  const ObjectIndex& index_;
  Owner& owner_;
  std::map<TenantId, Queue> queues_;   // none is ever erased
  std::multiset<ObjectId> from_disk_;  // of copies from the disk that are under way
  size_t under_way_ = 0;
  bool flushing_ = false;
};

}  // namespace ashlar::storage
