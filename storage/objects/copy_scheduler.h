// SPDX-License-Identifier: Apache-2.0
// CopyScheduler: queues and runs copies between tiers. It keeps the queues of objects to copy down before space is
// needed: to the tiers below, and to the disk in a drain.
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
    // Allocates space at `to` and starts a copy from `from` that no caller waits for. Returns false if there is no
    // space, or the entry has ended.
    virtual bool CopyDown(Entry& entry, size_t from, size_t to) = 0;
    // The first `loaded` extents of the copy at the level are there.
    virtual void Loaded(Entry& entry, size_t level, uint64_t loaded) = 0;
    // The copy or commit that was started for the level has ended.
    virtual void Ended(Entry& entry, size_t level, const absl::Status& status) = 0;
  };

  // All arguments must outlive the scheduler. `copying` copies between memory tiers.
  CopyScheduler(Levels& levels, Executor& copying, AdmissionPolicy& admission, const ObjectIndex& index, Owner& owner);

  // Starts to copy the object; the space must be allocated. `needed_at`: see TierCopier. No event is sent before this
  // returns.
  void Start(Entry& entry, size_t from, size_t to, Nanos needed_at);
  // Commits the copy that was written to the disk.
  void Commit(Entry& entry);
  // Moves the object's copies on the way up to an earlier time of need.
  void Hasten(Entry& entry, Nanos needed_at);
  // The first `loaded` extents of the source of this copy have become available.
  void Offer(Entry& entry, size_t level, uint64_t loaded);
  // Ends the copy at the level. If no piece is in flight, `Ended` is called before this returns, otherwise later. Does
  // not start waiting copies: the caller is freeing space that they must not take.
  void Cancel(Entry& entry, size_t level);

  // Queues the object if a tier below should have a copy of it.
  void QueueDown(Entry& entry);
  // Returns whether admission judges the objects that memory is about to evict and the disk does not have.
  bool JudgesEvicted() const { return ssd_ != nullptr && admission_.mode() != AdmissionMode::kAll; }
  // The pool will allocate extents at the level. Judges the objects that will be evicted soon, and queues the admitted
  // ones, so that they are on the disk by then.
  void BeforeEviction(const TenantPool& pool, size_t level, uint64_t extents);
  // Until EndFlush, writes objects that only memory has to the disk, regardless of admission: first the ones in
  // `order`, then others as they become whole. No object on the disk is evicted for them, and nothing else is copied
  // down. A degraded disk is tried once more; if it does not recover, nothing is written.
  void Flush(const std::vector<ObjectId>& order);
  void EndFlush() { flushing_ = false; }
  bool flushing() const { return flushing_; }

  // Starts what was waiting for space or for an executor. Call it periodically. PumpCopies: only copies in progress.
  void Pump();
  void PumpCopies() { copier_.Pump(); }

  size_t under_way() const { return under_way_; }  // copies between tiers, commits among them
  bool writing() const;                            // some copies down are in progress or waiting, and the disk responds
  std::vector<ObjectId> from_disk() const { return {from_disk_.begin(), from_disk_.end()}; }
  // Returns whether bytes of other nodes reach the level without a copy in CPU memory.
  bool ReadsStraightTo(size_t level) const { return copier_.ReadsStraightTo(levels_.TierAt(level)); }

 private:
  // A tenant's objects that wait to be copied down.
  struct Queue {
    std::deque<ObjectId> objects;
    size_t under_way = 0;   // copies and commits in progress that no caller waits for
    ObjectId admitted = 0;  // last object that was admitted but found no space; admission is not asked again
    uint64_t judged = 0;    // extents that can be allocated before more copies must be judged
  };

  TierCopier::End EndOf(const Entry& entry, size_t level) const;
  void Done(Entry& entry, size_t level, const absl::Status& status);
  void Judge(Entry& entry);
  void SetAdmitted(Entry& entry, bool admitted);
  bool WantsCopyDown(const Entry& entry);
  bool Admits(const Entry& entry, size_t level);
  // These two return false if the object should be tried again once there is space.
  bool CopyDown(Entry& entry);
  bool CopyToDisk(Entry& entry);  // during a flush, reads any whole copy and writes to free space
  void Pump(Queue& queue);

  static constexpr size_t kMaxIdleCopies = 64;  // limit of a tenant's copies that no caller waits for
  static constexpr size_t kMaxQueued = 1 << 16;

  Levels& levels_;
  SsdTier* const ssd_;
  TierCopier copier_;
  AdmissionPolicy& admission_;
  const ObjectIndex& index_;
  Owner& owner_;
  std::map<TenantId, Queue> queues_;   // entries are never erased
  std::multiset<ObjectId> from_disk_;  // copies from the disk in progress
  size_t under_way_ = 0;
  bool flushing_ = false;
};

}  // namespace ashlar::storage
