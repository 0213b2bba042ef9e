// SPDX-License-Identifier: Apache-2.0
// Copies: the space, the counts of readers and users, and the eviction of each copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/outcome.h"
#include "storage/objects/copy_scheduler.h"
#include "storage/objects/copy_state.h"
#include "storage/objects/entry.h"
#include "storage/objects/levels.h"
#include "storage/objects/object_index.h"

namespace ashlar::storage {

class Copies {
 public:
  // All arguments must outlive this object; the scheduler may be constructed later. `transition_counts`: see
  // CopyStates.
  Copies(Levels& levels, CopyScheduler& scheduler, const ObjectIndex& index, ObjectEvents& objects,
         CopyTransitionCounts* transition_counts);

  // Applies an event to the copy at the level (CopyStates).
  void Apply(Entry& entry, size_t level, CopyEvent event) const;

  // Allocates space at the level, if necessary in place of idle copies. Returns false if there is none, or if the
  // eviction of another shard of the bundle has ended the entry; do not use the entry then.
  bool Allocate(Entry& entry, size_t level, uint64_t extents);
  // Registers what an earlier run left on the disk, or what another node has. Another node's copy is released as soon
  // as this node has one, or the object is unused and no part of it is in flight.
  void AdoptOnDisk(Entry& entry, Slot slot);
  void AdoptRemote(Entry& entry, RemoteCopyId copy, Nanos cost);

  // A whole copy on this node is held while the caller reads it. Returns false if the object is gone or not ready, or
  // the copy is not whole or in GPU memory.
  bool Hold(Entry& entry, size_t level);
  void Unhold(Entry& entry, size_t level);
  // Call it if the bytes of a copy that the caller held differ from the published ones, or cannot be read. Removes the
  // copy, or the object if this is its last copy or the copy is in use.
  void Damaged(Entry& entry, size_t level, MissReason why);
  // Call it if bytes were wrong after a landing. Reports this to the node that they came from, if any.
  void Distrust(Entry& entry);

  // Ends a copy that is being filled.
  void Cancel(Entry& entry, size_t level);
  // Marks the copy as broken; `event` says why. Its space is released once it is unused.
  void Break(Entry& entry, size_t level, CopyEvent event);
  void RemoveReader(Entry& entry, size_t level);
  // Releases broken copies without readers and users. Call it after users are removed.
  void ReleaseBroken(Entry& entry);
  // Releases another node's copy if this node has its own and nothing reads the other one.
  void ReleaseRemote(Entry& entry);
  // Ends an object that only another node has, and for which no caller waits. Returns true if it has ended; it may then
  // be vacated.
  bool DropIfRemote(Entry& entry);

  // Updates everything derived from the entry's copies: their ranks, where the object resides, and whether it is saved.
  void Refresh(Entry& entry);
  // Releases the unused copies of an object that is gone. The entry is vacated with the last copy and reference.
  void Vacate(Entry& entry);
  void RefreshOrVacate(Entry& entry) { entry.gone == MissReason::kNone ? Refresh(entry) : Vacate(entry); }

  uint64_t memory_only() const { return memory_only_; }  // objects that only memory has
  uint64_t memory_only_bytes() const { return memory_only_bytes_; }

 private:
  void Evict(Entry& entry, size_t level);
  void Remove(Entry& entry, size_t level);
  void UpdateResidence(Entry& entry, bool live);

  Levels& levels_;
  CopyScheduler& scheduler_;
  const ObjectIndex& index_;
  ObjectEvents& objects_;
  const CopyStates states_;
  uint64_t memory_only_ = 0, memory_only_bytes_ = 0;
};

}  // namespace ashlar::storage
