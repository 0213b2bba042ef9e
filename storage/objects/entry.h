// SPDX-License-Identifier: Apache-2.0
// Entry: one cached object and its copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/ids.h"
#include "storage/objects/copy_state.h"
#include "storage/objects/tier_copier.h"
#include "storage/policy/eviction.h"
#include "storage/policy/reuse_models.h"
#include "storage/tier/remote_source.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

inline constexpr size_t kUsualLevels = 4;  // hbm, dram, ssd, and the level of other nodes

class ObjectTable;
struct Entry;

// An object's bytes in one tier.
struct Copy {
  CopyState state;
  uint8_t source = 0;                   // the level from which it is filled; its own level: an engine wrote it
  uint64_t loaded = 0;                  // number of its first extents that are there
  Slot slot;                            // empty in phase kNone, and if another node has the bytes
  Rank rank;                            // rank in the level's policy
  std::shared_ptr<TierCopy> tier_copy;  // set while pieces remain to be copied or are in flight

  CopyPhase phase() const { return state.phase(); }
  bool busy() const { return state.busy(); }
  bool whole() const { return state.whole(); }
  bool readable() const { return state.readable(); }
};

// Events of an entry, for the table that owns it.
class ObjectEvents {
 public:
  virtual ~ObjectEvents() = default;
  // No tier has the object any longer: its last copy was evicted or cannot be read. Called once; the table then calls
  // Placement::Discard.
  virtual void Lost(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) = 0;
  // A discarded object has no copy left, and no references. The table deletes the entry.
  virtual void Vacated(Entry& entry) = 0;
  // `resides` or `saved` of the entry has changed.
  virtual void Resides(Entry& entry) = 0;
};

// Owned by the table, and never moved. The fields that every lookup needs come first.
struct Entry : RankedObject {
  ReuseKind KindOfReuse() const;
  ReuseModel::Subject AtEviction() const;

  bool ready = false;        // published; before that it is reserved or being published
  bool pinned = false;       // an operator pinned it: at least one tier keeps a copy
  bool doomed = false;       // ends with its last reference, unless it is reserved again
  bool erased = false;       // an operator erased it: its bytes on the disk are overwritten
  bool damaged = false;      // a checksum failed, perhaps because a crash interrupted an erasure
  bool queued_down = false;  // its tenant's queue of objects to copy down has it
  bool memory_only = false;  // published, and not on the disk
  bool deferred = false;     // not written to the disk ahead of need (Placement::Defer)
  bool judged = false;       // admission has judged it for eviction; reset by a use
  bool admitted = false;     // admission accepted it; the write to the disk is pending
  bool ends_text = false;  // the states at the end of a text: its next turn resumes there, and hardly any other prompt
  // Its transfer to another node in a drain. kOffered: the disk does not write it meanwhile. kAccepted: it counts as
  // saved.
  enum class Transfer : uint8_t { kNone, kOffered, kAccepted, kDeclined };
  Transfer transfer = Transfer::kNone;
  bool adopted = false;                 // copied from another node's offer; no engine has requested it yet
  MissReason gone = MissReason::kNone;  // why lookups do not find it any more; its bytes stay until its last reference
  uint32_t references = 0;              // references to all copies together
  uint32_t holds = 0;                   // calls on the stack that use the entry: it is not vacated meanwhile
  uint32_t uses = 0;                    // lookups that found it
  uint32_t turns = 0;                   // how often its text had been continued when it was published
  Nanos published_at = 0;
  Nanos last_used_at = 0;                             // last lookup; before the first one: time of publication
  std::optional<std::list<Entry*>::iterator> by_use;  // its place in the order in which objects expire
  // By level, with other nodes last. Sized once; larger than usual if several GPUs have a tier each.
  absl::InlinedVector<Copy, kUsualLevels> copies = absl::InlinedVector<Copy, kUsualLevels>(kUsualLevels);
  ObjectTable* table = nullptr;   // its owner
  ObjectHeader header;            // the plan until the object is ready
  RemoteCopyId remote = 0;        // the copy on another node, if any
  RemoteCopyId fetched_from = 0;  // the remote copy that its bytes came from; 0: this node computed them
  Nanos remote_cost = 0;          // estimated time to fetch it; 0: unknown
  uint64_t group = 0;             // Offering::group
  // The tier and level of the nearest whole copy on this node, and whether the disk has one.
  TierKind resides = TierKind::kNone;
  uint8_t resides_at = 0;
  bool saved = false;
  // The last report to ObjectTableOptions::residence, and its answer.
  TierKind reported = TierKind::kNone, announced = TierKind::kNone;
  uint8_t reported_at = 0;

  struct Waiter {
    size_t level;
    uint64_t extents;  // extents of the copy at the level
    std::function<void()> call;
  };
  std::vector<Waiter> waiters;
  // Its last promotion: start, source level, and time of need.
  Nanos promoted_at = 0;
  size_t promoted_from = 0;
  Nanos needed_at = 0;
  Nanos pinned_until = 0;  // 0: no end
};

// Returns whether the reservation only holds space and never becomes an object (Cache::Reserve).
inline bool IsSpaceOnly(const ObjectHeader& plan) {
  return plan.tokens == 0;
}

inline ReuseKind Entry::KindOfReuse() const {
  if (pool.kind == PoolKind::kPrivate) return ReuseKind::kOwn;
  switch (header.kind) {
    case ObjectKind::kSegment:
      return ReuseKind::kSegment;
    case ObjectKind::kPrefixBlock:
      return ReuseKind::kBlock;
    default:
      return ReuseKind::kCheckpoint;
  }
}

inline ReuseModel::Subject Entry::AtEviction() const {
  const ReuseKind end = uses == 0 ? ReuseKind::kRequestEnd : ReuseKind::kContinued;
  return {.kind = ends_text ? end : KindOfReuse(), .uses = uses + turns};
}

}  // namespace ashlar::storage
