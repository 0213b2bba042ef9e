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
#include "storage/objects/tier_copier.h"
#include "storage/policy/eviction.h"
#include "storage/policy/reuse_models.h"
#include "storage/tier/remote_source.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

inline constexpr size_t kUsualLevels = 4;  // hbm, dram, ssd, and the tier of other nodes

class ObjectTable;

// An object's bytes in one tier. The slot is valid in every state but kNone; it is empty for a copy on another node.
struct Copy {
  enum class State : uint8_t {
    kNone,
    kCopying,     // its first `loaded` extents are whole
    kCommitting,  // on a disk: written but not yet acknowledged
    kWhole,
    kDraining,  // no longer wanted, but a write to the slot is in flight; if it has users, it is wanted again and
                // filled anew afterwards
    kBroken,    // filling or committing it failed; users of the slot keep it
  };
  State state = State::kNone;
  uint8_t source = 0;    // in kCopying and kDraining: level of the source
  uint32_t readers = 0;  // copies that read from it; the slot must not be reused meanwhile
  uint32_t users = 0;    // references that keep it in place or wait until it is filled
  uint64_t loaded = 0;   // number of whole extents, from the start
  Slot slot;
  Rank rank;                            // rank in the level's policy
  std::shared_ptr<TierCopy> tier_copy;  // set in kCopying and kDraining

  bool whole() const { return state == State::kWhole; }
  // A copy on a disk is readable before the disk has acknowledged it.
  bool readable() const { return whole() || state == State::kCommitting; }
};

// Owned by the table; never moved. The fields that every lookup needs come first.
struct Entry : RankedObject {
  bool ready = false;     // published; otherwise reserved or being published
  bool pinned = false;    // an operator pinned it: one copy stays in some tier
  bool doomed = false;    // no longer wanted: ends with its last reference unless it is reserved again
  bool erased = false;    // an operator erased it: nothing of it stays
  bool damaged = false;   // a checksum failed, or a crash interrupted an erasure that may have overwritten a part
  bool behind = false;    // queued for writing to lower tiers
  bool unsaved = false;   // published, but in memory only
  bool deferred = false;  // not written to the disk ahead of need (ObjectTable::Defer)
  // State of its offer to other nodes in a drain: kOffered suspends the write to the disk, kTaken counts as saved.
  enum class Hand : uint8_t { kNone, kOffered, kTaken, kDeclined };
  Hand hand = Hand::kNone;
  bool taken = false;                   // came from another node's offer; no engine here has requested it
  MissReason gone = MissReason::kNone;  // reason why it left the table; its bytes stay until the last reference ends
  uint32_t references = 0;              // references to any of its copies
  uint32_t holds = 0;                   // calls in progress on it
  uint32_t uses = 0;                    // lookups that found it
  Nanos published_at = 0;
  Nanos last_used_at = 0;                               // time of the last lookup; before the first one, of publication
  std::optional<std::list<ObjectId>::iterator> by_use;  // position in the list of objects that expire
  // One per level; the size never changes. More than kUsualLevels if several GPUs have a tier each.
  absl::InlinedVector<Copy, kUsualLevels> copies = absl::InlinedVector<Copy, kUsualLevels>(kUsualLevels);
  ObjectTable* table = nullptr;  // the owner
  ObjectHeader header;           // the plan until the object is ready
  RemoteCopyId remote = 0;       // number of the copy on another node, if any
  RemoteCopyId came_by = 0;      // the copy on another node that was its source; 0: published on this node
  Nanos remote_cost = 0;         // estimated time of a fetch; 0: unknown
  uint64_t group = 0;            // group of objects that are used together (Offering::group)
  // Tier of the nearest whole copy on this node, and what other nodes were told of it.
  TierKind resides = TierKind::kNone, told = TierKind::kNone;
  TierKind resided = TierKind::kNone;  // `resides` at the last report
  bool saved = false;
  uint8_t resides_at = 0, resided_at = 0;  // levels of `resides` and `resided`

  struct Waiter {
    size_t level;      // level of the copy
    uint64_t extents;  // its length in extents
    std::function<void()> call;
  };
  std::vector<Waiter> waiters;
  Nanos asked_at = 0;  // its last promotion: start, source level, and time of need
  size_t asked_of = 0;
  Nanos needed_at = 0;
  Nanos pinned_until = 0;  // 0: without end
};

}  // namespace ashlar::storage
