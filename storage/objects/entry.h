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
  uint8_t source = 0;                   // the level that it is filled from; its own level: an engine wrote it
  uint64_t loaded = 0;                  // extents, from the first one
  Slot slot;                            // empty in phase kNone, and where another node has the bytes
  Rank rank;                            // in the level's policy
  std::shared_ptr<TierCopy> tier_copy;  // while pieces are to be copied, or are being copied

  CopyPhase phase() const { return state.phase(); }
  bool used() const { return state.used(); }
  bool whole() const { return state.whole(); }
  bool readable() const { return state.readable(); }
};

// What happens to an entry, for the table that owns it.
class ObjectEvents {
 public:
  virtual ~ObjectEvents() = default;
  // No tier has the object any more: its last copy was evicted, or cannot be read. Called once; the table answers with
  // Placement::Discard.
  virtual void Lost(Entry& entry, MissReason why, PolicyKind policy, TierKind tier) = 0;
  // A discarded object has no copy left, and no references. The table deletes the entry.
  virtual void Vacated(Entry& entry) = 0;
  // `resides` or `saved` of the entry has changed.
  virtual void Resides(Entry& entry) = 0;
};

// Owned by the table, and never moved. The fields that every lookup needs come first.
struct Entry : RankedObject {
  bool ready = false;        // published; before that it is reserved or being published
  bool pinned = false;       // by an operator: one copy stays in some tier
  bool doomed = false;       // ends with its last reference, unless it is reserved again
  bool erased = false;       // by an operator: its bytes on the disk are overwritten
  bool damaged = false;      // a checksum failed, perhaps because a crash interrupted an erasure
  bool queued_down = false;  // in the queue of its tenant's objects to copy down
  bool unsaved = false;      // published, and no copy on the disk
  bool deferred = false;     // not written to the disk ahead of need (ObjectTable::Defer)
  // Its transfer to another node in a drain. kOffered: the disk does not write it meanwhile. kTaken: it counts as
  // saved.
  enum class Transfer : uint8_t { kNone, kOffered, kTaken, kDeclined };
  Transfer transfer = Transfer::kNone;
  bool taken = false;                   // another node offered it, and no engine asked for it here
  MissReason gone = MissReason::kNone;  // why lookups do not find it any more; its bytes stay until its last reference
  uint32_t references = 0;              // to all copies together
  uint32_t holds = 0;                   // calls on the stack that use the entry: it is not vacated meanwhile
  uint32_t uses = 0;                    // lookups that found it
  Nanos published_at = 0;
  Nanos last_used_at = 0;                             // by a lookup; before the first one: published
  std::optional<std::list<Entry*>::iterator> by_use;  // its place in the order in which objects expire
  // By level, and other nodes last. Sized once; more than the usual number where several GPUs have a tier each.
  absl::InlinedVector<Copy, kUsualLevels> copies = absl::InlinedVector<Copy, kUsualLevels>(kUsualLevels);
  ObjectTable* table = nullptr;   // its owner
  ObjectHeader header;            // the plan until the object is ready
  RemoteCopyId remote = 0;        // the copy on another node, while there is one
  RemoteCopyId fetched_from = 0;  // the remote copy that its bytes came from; 0: this node computed them
  Nanos remote_cost = 0;          // estimated time to fetch it; 0: unknown
  uint64_t group = 0;             // Offering::group
  // The tier and level of the nearest whole copy on this node, and whether the disk has one.
  TierKind resides = TierKind::kNone;
  uint8_t resides_at = 0;
  bool saved = false;
  // What ObjectTableOptions::residence was told last, and what it answered.
  TierKind resided = TierKind::kNone, told = TierKind::kNone;
  uint8_t resided_at = 0;

  struct Waiter {
    size_t level;
    uint64_t extents;  // of the copy at the level
    std::function<void()> call;
  };
  std::vector<Waiter> waiters;
  // Its last promotion: when it began, from which level, and when it is needed.
  Nanos promoted_at = 0;
  size_t promoted_from = 0;
  Nanos needed_at = 0;
  Nanos pinned_until = 0;  // 0: no end
};

}  // namespace ashlar::storage
