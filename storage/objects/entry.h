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

inline constexpr size_t kUsualLevels = 4;  // hbm, dram, ssd; below them another node

class ObjectTable;

// An object's bytes in one tier. The slot is there in every state but kNone, and empty where another node has them.
struct Copy {
  enum class State : uint8_t {
    kNone,
    kCopying,     // of its extents the first `loaded` are whole
    kCommitting,  // on a disk: written, and not yet acknowledged
    kWhole,
    kDraining,  // was not wanted any more; something is still being written there. With users: it is wanted again, and
                // filled anew behind that
    kBroken,    // filling or committing it failed; who uses the place keeps it
  };
  State state = State::kNone;
  uint8_t source = 0;    // kCopying, kDraining: the level that it is filled from
  uint32_t readers = 0;  // copies that read it, and would read other objects' bytes if it went
  uint32_t users = 0;    // references that keep it where it is, or for which it is filled
  uint64_t loaded = 0;   // extents
  Slot slot;
  Rank rank;                            // in the level's policy
  std::shared_ptr<TierCopy> tier_copy;  // kCopying, kDraining

  bool whole() const { return state == State::kWhole; }
  // A disk's copy can be read before the disk has acknowledged it.
  bool readable() const { return whole() || state == State::kCommitting; }
};

// Owned by the table, and never moved. The fields that every look-up needs come first.
struct Entry : RankedObject {
  bool ready = false;     // published; before that it is reserved or being published
  bool pinned = false;    // by an operator: one copy stays in some tier
  bool doomed = false;    // not wanted any more: it ends with its last reference, unless it is reserved again
  bool erased = false;    // by an operator: nothing of it stays
  bool damaged = false;   // a checksum failed; an erasure that a crash ended may have begun to overwrite it
  bool behind = false;    // waits to be written to the tiers below
  bool unsaved = false;   // published, and no copy on the disk: memory has it alone
  bool deferred = false;  // is not written to the disk ahead of need (ObjectTable::Defer)
  // What a drain does about it with other nodes: kOffered keeps the disk from it meanwhile, kTaken counts as saved.
  enum class Hand : uint8_t { kNone, kOffered, kTaken, kDeclined };
  Hand hand = Hand::kNone;
  bool taken = false;                   // another node offered it, and no engine asked for it here
  MissReason gone = MissReason::kNone;  // why no table has it any more; its bytes stay until the last reference goes
  uint32_t references = 0;              // uses, of all copies
  uint32_t holds = 0;                   // calls that are at work on it
  uint32_t uses = 0;                    // look-ups that found it
  Nanos published_at = 0;
  Nanos last_used_at = 0;                               // by a look-up; before the first one: published
  std::optional<std::list<ObjectId>::iterator> by_use;  // where objects of its tenant expire
  // By level; sized once. More than the usual ones where several GPUs have a tier each.
  absl::InlinedVector<Copy, kUsualLevels> copies = absl::InlinedVector<Copy, kUsualLevels>(kUsualLevels);
  ObjectTable* table = nullptr;  // that owns it
  ObjectHeader header;           // the plan until the object is ready
  RemoteCopyId remote = 0;       // of the copy on another node, while there is one
  RemoteCopyId came_by = 0;      // the copy on another node that its bytes came from; 0: they are of this node
  Nanos remote_cost = 0;         // estimates the time that it takes to come; 0: not known
  uint64_t group = 0;            // of objects that are of use together (Offering::group)
  // Where the nearest whole copy of this node is, whether its disk has one, and what others were told of it.
  TierKind resides = TierKind::kNone, told = TierKind::kNone;
  TierKind resided = TierKind::kNone;  // `resides` when it was last told of
  bool saved = false;
  uint8_t resides_at = 0, resided_at = 0;  // the levels of `resides` and `resided`

  struct Waiter {
    size_t level;      // of the copy
    uint64_t extents;  // of it
    std::function<void()> call;
  };
  std::vector<Waiter> waiters;
  Nanos asked_at = 0;  // its last promotion: when, from which level, and by when it is needed
  size_t asked_of = 0;
  Nanos needed_at = 0;
  Nanos pinned_until = 0;  // 0: for good
};

}  // namespace ashlar::storage
